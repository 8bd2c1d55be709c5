"""Texts for record extraction, and requests for tool calls."""

from __future__ import annotations

from tools.train.demo import words
from tools.train.demo.words import WordSampler


def a_name(rng: WordSampler) -> str:
    return f"{rng.pick(words.FIRST)} {rng.pick(words.LAST)}"


def a_mail(rng: WordSampler, name: str) -> str:
    first, last = name.lower().split()
    host = rng.pick(words.COMPANIES).lower().replace(" ", "")
    return rng.any([f"{first}.{last}@{host}.example", f"{first[0]}{last}@{host}.example", f"{last}{rng.randint(1, 99)}@mail.example"])


def a_date(rng: WordSampler) -> str:
    month, day, year = rng.randint(1, 12), rng.randint(1, 28), rng.randint(2024, 2028)
    return rng.any([f"{year}-{month:02}-{day:02}", f"{day} {words.MONTHS[month - 1]} {year}", f"{words.MONTHS[month - 1]} {day}, {year}"])


def a_time(rng: WordSampler) -> str:
    return f"{rng.randint(7, 21):02}:{rng.any(['00', '15', '30', '45'])}"


def person_text(rng: WordSampler) -> str:
    name, age, city, job = a_name(rng), rng.randint(18, 84), rng.pick(words.CITIES), rng.pick(words.JOBS)
    mail = a_mail(rng, name)
    return rng.any(
        [
            f"{name} is a {age} year old {job} who lives in {city}. Write to {mail}.",
            f"You can reach {name}, {age}, a {job} from {city}, at {mail}.",
            f"My neighbour {name} works as a {job} in {city}. Age: {age}. Email: {mail}",
            f"Contact: {name} ({mail}), {job}, age {age}, {city}.",
            f"I am {name}, {age}, born in {rng.pick(words.CITIES)} and now living in {city}, where I am a {job}. My address is {mail}.",
        ]
    )


def order_text(rng: WordSampler) -> str:
    name, street, city = a_name(rng), f"{rng.randint(1, 180)} {rng.pick(words.STREETS)}", rng.pick(words.CITIES)
    items = [f"{rng.randint(2, 9)} x {rng.pick(words.PRODUCTS)} at {rng.price()} each" for _ in range(rng.randint(1, 2))]
    speed = rng.any(["by express", "with normal delivery", "as soon as possible, express please", "no hurry"])
    return rng.any(
        [
            f"{name} orders {' and '.join(items)}, to be sent to {street}, {city}, {speed}.",
            f"New order. Customer: {name}. Items: {'; '.join(items)}. Ship to {street}, {city}, {speed}.",
            f"Hello, this is {name}. Please send me {' and '.join(items)}. I live at {street} in {city}, {speed}.",
        ]
    )


def event_text(rng: WordSampler) -> str:
    title, location = rng.pick(words.EVENTS), f"{rng.pick(words.STREETS)} {rng.randint(1, 90)}, {rng.pick(words.CITIES)}"
    people = " and ".join(a_name(rng) for _ in range(rng.randint(1, 3)))
    return rng.any(
        [
            f"The {title} is on {a_date(rng)} at {a_time(rng)}, {location}. {people} will be there.",
            f"Reminder: {title}, {a_date(rng)}, starting {a_time(rng)}. Where: {location}. Invited: {people}.",
            f"Let us meet for the {title} at {location} on {a_date(rng)}. We begin at {a_time(rng)}. I asked {people} to come.",
        ]
    )


def review_text(rng: WordSampler) -> str:
    product = rng.pick(words.PRODUCTS)
    opinion = rng.any(
        [
            f"I love this {product}. It arrived in {rng.randint(2, 6)} days and works perfectly. I would buy it again.",
            f"The {product} broke after {rng.randint(2, 9)} weeks. Very disappointing, do not buy it.",
            f"The {product} is fine for {rng.price()} dollars. Nothing special, but it does its job.",
            f"Great {product}! My friend {rng.pick(words.FIRST)} now wants one too. Five stars.",
            f"The colour of the {product} is wrong and the box was open. I sent it back.",
            f"A decent {product}, although the manual is hard to read. {rng.randint(3, 4)} out of 5.",
        ]
    )
    return f"Review: {opinion}"


def ticket_text(rng: WordSampler) -> str:
    name, order = a_name(rng), f"{''.join(rng.any('ABCDEFGHKLMNPRSTUVWX') for _ in range(2))}-{rng.randint(10_000, 99_999)}"
    return rng.any(
        [
            f"My name is {name}. I was charged twice for order {order}. Please refund me at once!",
            f"Where is my parcel? Order {order} should have come on {rng.any(words.DAYS)}. Regards, {name}",
            f"{name} here. The {rng.pick(words.PRODUCTS)} of order {order} does not switch on. What can I do?",
            f"Hello, could you change the invoice of order {order} to my company {rng.pick(words.COMPANIES)}? No hurry. {name}",
            f"The app crashes when I open order {order}. I have a deadline today. {name}",
        ]
    )


def job_text(rng: WordSampler) -> str:
    company, job, city, salary = rng.pick(words.COMPANIES), rng.pick(words.JOBS), rng.pick(words.CITIES), rng.randint(22, 140) * 1000
    where = rng.any(["You can work from home.", "The work is on site.", "Remote work is possible.", "You come to the office every day."])
    return rng.any(
        [
            f"{company} in {city} is looking for a {job}. The salary is {salary} a year. {where}",
            f"We are {company}. Join us as a {job} in {city}! We pay {salary}. {where}",
            f"Vacancy: {job} at {company}, {city}. Salary: {salary}. {where}",
        ]
    )


def journey_text(rng: WordSampler) -> str:
    name, start, end = a_name(rng), rng.pick(words.CITIES), rng.pick(words.CITIES)
    seat = rng.any(["economy", "business"])
    return rng.any(
        [
            f"{name} flies from {start} to {end} on {a_date(rng)} in {seat} class.",
            f"Please book a {seat} seat for {name}: {start} to {end}, {a_date(rng)}.",
            f"On {a_date(rng)} I travel to {end}. I start in {start} and want to sit in {seat}. My name is {name}.",
        ]
    )


def address_text(rng: WordSampler) -> str:
    first, last, street, city = rng.pick(words.FIRST), rng.pick(words.LAST), rng.pick(words.STREETS), rng.pick(words.CITIES)
    number, code = rng.randint(1, 250), rng.randint(10_000, 99_999)
    return rng.any(
        [
            f"{first} {last}, {number} {street}, {code} {city}",
            f"Send it to {first} {last} at {street} {number} in {city}, postal code {code}.",
            f"{last}, {first} lives in {city} ({code}), {street} {number}.",
        ]
    )


def tool_request(name: str, rng: WordSampler) -> str:
    requests = {
        "get_weather": [
            f"What is the weather like in {rng.pick(words.CITIES)}?",
            f"Is it raining in {rng.pick(words.CITIES)}? In celsius, please.",
            f"How warm is it in {rng.pick(words.CITIES)} today, in fahrenheit?",
        ],
        "set_alarm": [
            f"Wake me at {a_time(rng)} for the {rng.pick(words.EVENTS)}.",
            f"Set an alarm for {a_time(rng)}, label it {rng.pick(words.EVENTS)}.",
        ],
        "send_message": [
            f"Tell {a_name(rng)} that I will be {rng.randint(5, 50)} minutes late.",
            f"Write to {a_name(rng)}: the {rng.pick(words.EVENTS)} is on {rng.any(words.DAYS)}.",
            f"Ask {rng.pick(words.FIRST)} if the {rng.pick(words.PRODUCTS)} has arrived.",
        ],
        "create_event": [
            f"Put the {rng.pick(words.EVENTS)} on {a_date(rng)} at {a_time(rng)} into my calendar.",
            f"Schedule a {rng.pick(words.EVENTS)} for {a_date(rng)}, {a_time(rng)}.",
        ],
        "convert_currency": [
            f"How much is {rng.randint(5, 900)} {rng.any(words.CURRENCIES)} in {rng.any(words.CURRENCIES)}?",
            f"Convert {rng.price()} {rng.any(words.CURRENCIES)} to {rng.any(words.CURRENCIES)}.",
        ],
        "translate": [
            f"How do you say 'where is the {rng.pick(words.PRODUCTS)}' in {rng.any(words.LANGUAGES)}?",
            f"Translate 'I live in {rng.pick(words.CITIES)}' to {rng.any(words.LANGUAGES)}.",
        ],
        "search_products": [
            f"Find me a {rng.pick(words.PRODUCTS)} for less than {rng.randint(10, 200)} euros.",
            f"I need a {rng.pick(words.PRODUCTS)}, at most {rng.randint(10, 200)}.",
        ],
        "play_music": [
            f"Play {rng.pick(words.SONGS)} at volume {rng.randint(5, 100)}.",
            f"I want to hear {rng.pick(words.SONGS)}, not too loud, {rng.randint(5, 50)} percent.",
        ],
    }
    return rng.any(requests[name])

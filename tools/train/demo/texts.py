"""Texts for record extraction, and requests for tool calls."""

from __future__ import annotations

from tools.train.demo import words
from tools.train.demo.words import Words


def a_name(drawn: Words) -> str:
    return f"{drawn.of(words.FIRST)} {drawn.of(words.LAST)}"


def a_mail(drawn: Words, name: str) -> str:
    first, last = name.lower().split()
    host = drawn.of(words.COMPANIES).lower().replace(" ", "")
    return drawn.any([f"{first}.{last}@{host}.example", f"{first[0]}{last}@{host}.example", f"{last}{drawn.number(1, 99)}@mail.example"])


def a_date(drawn: Words) -> str:
    month, day, year = drawn.number(1, 12), drawn.number(1, 28), drawn.number(2024, 2028)
    return drawn.any([f"{year}-{month:02}-{day:02}", f"{day} {words.MONTHS[month - 1]} {year}", f"{words.MONTHS[month - 1]} {day}, {year}"])


def a_time(drawn: Words) -> str:
    return f"{drawn.number(7, 21):02}:{drawn.any(['00', '15', '30', '45'])}"


def person_text(drawn: Words) -> str:
    name, age, city, job = a_name(drawn), drawn.number(18, 84), drawn.of(words.CITIES), drawn.of(words.JOBS)
    mail = a_mail(drawn, name)
    return drawn.any(
        [
            f"{name} is a {age} year old {job} who lives in {city}. Write to {mail}.",
            f"You can reach {name}, {age}, a {job} from {city}, at {mail}.",
            f"My neighbour {name} works as a {job} in {city}. Age: {age}. Email: {mail}",
            f"Contact: {name} ({mail}), {job}, age {age}, {city}.",
            f"I am {name}, {age}, born in {drawn.of(words.CITIES)} and now living in {city}, where I am a {job}. My address is {mail}.",
        ]
    )


def order_text(drawn: Words) -> str:
    name, street, city = a_name(drawn), f"{drawn.number(1, 180)} {drawn.of(words.STREETS)}", drawn.of(words.CITIES)
    items = [f"{drawn.number(2, 9)} x {drawn.of(words.PRODUCTS)} at {drawn.price()} each" for _ in range(drawn.number(1, 2))]
    speed = drawn.any(["by express", "with normal delivery", "as soon as possible, express please", "no hurry"])
    return drawn.any(
        [
            f"{name} orders {' and '.join(items)}, to be sent to {street}, {city}, {speed}.",
            f"New order. Customer: {name}. Items: {'; '.join(items)}. Ship to {street}, {city}, {speed}.",
            f"Hello, this is {name}. Please send me {' and '.join(items)}. I live at {street} in {city}, {speed}.",
        ]
    )


def event_text(drawn: Words) -> str:
    title, location = drawn.of(words.EVENTS), f"{drawn.of(words.STREETS)} {drawn.number(1, 90)}, {drawn.of(words.CITIES)}"
    people = " and ".join(a_name(drawn) for _ in range(drawn.number(1, 3)))
    return drawn.any(
        [
            f"The {title} is on {a_date(drawn)} at {a_time(drawn)}, {location}. {people} will be there.",
            f"Reminder: {title}, {a_date(drawn)}, starting {a_time(drawn)}. Where: {location}. Invited: {people}.",
            f"Let us meet for the {title} at {location} on {a_date(drawn)}. We begin at {a_time(drawn)}. I asked {people} to come.",
        ]
    )


def review_text(drawn: Words) -> str:
    product = drawn.of(words.PRODUCTS)
    opinion = drawn.any(
        [
            f"I love this {product}. It arrived in {drawn.number(2, 6)} days and works perfectly. I would buy it again.",
            f"The {product} broke after {drawn.number(2, 9)} weeks. Very disappointing, do not buy it.",
            f"The {product} is fine for {drawn.price()} dollars. Nothing special, but it does its job.",
            f"Great {product}! My friend {drawn.of(words.FIRST)} now wants one too. Five stars.",
            f"The colour of the {product} is wrong and the box was open. I sent it back.",
            f"A decent {product}, although the manual is hard to read. {drawn.number(3, 4)} out of 5.",
        ]
    )
    return f"Review: {opinion}"


def ticket_text(drawn: Words) -> str:
    name, order = a_name(drawn), f"{''.join(drawn.any('ABCDEFGHKLMNPRSTUVWX') for _ in range(2))}-{drawn.number(10_000, 99_999)}"
    return drawn.any(
        [
            f"My name is {name}. I was charged twice for order {order}. Please refund me at once!",
            f"Where is my parcel? Order {order} should have come on {drawn.any(words.DAYS)}. Regards, {name}",
            f"{name} here. The {drawn.of(words.PRODUCTS)} of order {order} does not switch on. What can I do?",
            f"Hello, could you change the invoice of order {order} to my company {drawn.of(words.COMPANIES)}? No hurry. {name}",
            f"The app crashes when I open order {order}. I have a deadline today. {name}",
        ]
    )


def job_text(drawn: Words) -> str:
    company, job, city, salary = drawn.of(words.COMPANIES), drawn.of(words.JOBS), drawn.of(words.CITIES), drawn.number(22, 140) * 1000
    where = drawn.any(["You can work from home.", "The work is on site.", "Remote work is possible.", "You come to the office every day."])
    return drawn.any(
        [
            f"{company} in {city} is looking for a {job}. The salary is {salary} a year. {where}",
            f"We are {company}. Join us as a {job} in {city}! We pay {salary}. {where}",
            f"Vacancy: {job} at {company}, {city}. Salary: {salary}. {where}",
        ]
    )


def journey_text(drawn: Words) -> str:
    name, start, end = a_name(drawn), drawn.of(words.CITIES), drawn.of(words.CITIES)
    seat = drawn.any(["economy", "business"])
    return drawn.any(
        [
            f"{name} flies from {start} to {end} on {a_date(drawn)} in {seat} class.",
            f"Please book a {seat} seat for {name}: {start} to {end}, {a_date(drawn)}.",
            f"On {a_date(drawn)} I travel to {end}. I start in {start} and want to sit in {seat}. My name is {name}.",
        ]
    )


def address_text(drawn: Words) -> str:
    first, last, street, city = drawn.of(words.FIRST), drawn.of(words.LAST), drawn.of(words.STREETS), drawn.of(words.CITIES)
    number, code = drawn.number(1, 250), drawn.number(10_000, 99_999)
    return drawn.any(
        [
            f"{first} {last}, {number} {street}, {code} {city}",
            f"Send it to {first} {last} at {street} {number} in {city}, postal code {code}.",
            f"{last}, {first} lives in {city} ({code}), {street} {number}.",
        ]
    )


def tool_request(name: str, drawn: Words) -> str:
    requests = {
        "get_weather": [
            f"What is the weather like in {drawn.of(words.CITIES)}?",
            f"Is it raining in {drawn.of(words.CITIES)}? In celsius, please.",
            f"How warm is it in {drawn.of(words.CITIES)} today, in fahrenheit?",
        ],
        "set_alarm": [
            f"Wake me at {a_time(drawn)} for the {drawn.of(words.EVENTS)}.",
            f"Set an alarm for {a_time(drawn)}, label it {drawn.of(words.EVENTS)}.",
        ],
        "send_message": [
            f"Tell {a_name(drawn)} that I will be {drawn.number(5, 50)} minutes late.",
            f"Write to {a_name(drawn)}: the {drawn.of(words.EVENTS)} is on {drawn.any(words.DAYS)}.",
            f"Ask {drawn.of(words.FIRST)} if the {drawn.of(words.PRODUCTS)} has arrived.",
        ],
        "create_event": [
            f"Put the {drawn.of(words.EVENTS)} on {a_date(drawn)} at {a_time(drawn)} into my calendar.",
            f"Schedule a {drawn.of(words.EVENTS)} for {a_date(drawn)}, {a_time(drawn)}.",
        ],
        "convert_currency": [
            f"How much is {drawn.number(5, 900)} {drawn.any(words.CURRENCIES)} in {drawn.any(words.CURRENCIES)}?",
            f"Convert {drawn.price()} {drawn.any(words.CURRENCIES)} to {drawn.any(words.CURRENCIES)}.",
        ],
        "translate": [
            f"How do you say 'where is the {drawn.of(words.PRODUCTS)}' in {drawn.any(words.LANGUAGES)}?",
            f"Translate 'I live in {drawn.of(words.CITIES)}' to {drawn.any(words.LANGUAGES)}.",
        ],
        "search_products": [
            f"Find me a {drawn.of(words.PRODUCTS)} for less than {drawn.number(10, 200)} euros.",
            f"I need a {drawn.of(words.PRODUCTS)}, at most {drawn.number(10, 200)}.",
        ],
        "play_music": [
            f"Play {drawn.of(words.SONGS)} at volume {drawn.number(5, 100)}.",
            f"I want to hear {drawn.of(words.SONGS)}, not too loud, {drawn.number(5, 50)} percent.",
        ],
    }
    return drawn.any(requests[name])

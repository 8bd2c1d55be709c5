"""Word lists of the demonstration's prompts. A fifth of every list is held out for measurements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def _split(written: str) -> list[str]:
    return written.replace("\n", "").split("|")


FIRST = """Anna Tom Lucia Wei Omar Ingrid Mateo Priya Jonas Aisha Pavel Chloe Diego Hana Samuel Fatima Lars Nina Kofi Elena Victor
Mei Rosa Ahmed Sofia Daniel Yuki Marta Ivan Grace Hugo Leila Felix Amara Noah Ines Ravi Clara Bruno Zara Oscar Maya
Stefan Julia Karim Emma Luca Nadia Peter Alice Hassan Eva Marco Lily Andre Tessa Viktor Jade Simon Dora""".split()
LAST = """Berg Baker Fernandez Chen Haddad Larsen Silva Sharma Keller Okafor Novak Dubois Morales Tanaka Reed Rahman Nilsson
Petrova Mensah Rossi Hughes Lin Costa Farouk Weber Garcia Sato Kowalska Ivanov Bennett Marchand Nasser Braun Diallo
Carter Lopes Patel Fischer Moretti Khan Lindgren Torres Popescu Winter Aziz Stone Ricci Hansen Clarke Murphy Saleh
Horvat Conti Wright Leroy Maier Sokolov Palmer Vega""".split()
CITIES = _split("""Oslo|Leeds|Madrid|Singapore|Cairo|Bergen|Lisbon|Mumbai|Zurich|Lagos|Prague|Lyon|Bogota|Kyoto|Denver|Dhaka|
Malmo|Sofia|Accra|Turin|Cardiff|Taipei|Porto|Tunis|Hamburg|Seville|Osaka|Krakow|Riga|Bristol|Lille|Beirut|Munich|Dakar|
Boston|Recife|Chennai|Vienna|Naples|Karachi|Uppsala|Lima|Bucharest|Graz|Amman|Perth|Bologna|Aarhus|Glasgow|Cork|Austin|
Zagreb|Genoa|Toronto|Nantes|Salzburg|Tallinn|Auckland|Santiago""")
JOBS = _split("""carpenter|pilot|nurse|professor|baker|electrician|journalist|dentist|architect|farmer|translator|mechanic|
librarian|chemist|photographer|plumber|lawyer|violinist|gardener|accountant|programmer|teacher|surgeon|bus driver|chef|
fisherman|designer|vet|judge|tailor|geologist|barber|actor|painter|sailor|paramedic|florist|economist|guide|welder""")
PRODUCTS = _split("""desk lamp|coffee grinder|rain jacket|office chair|phone case|water bottle|garden hose|running shoes|keyboard|
backpack|wool blanket|frying pan|bicycle pump|notebook|headphones|camping stove|toaster|umbrella|bookshelf|yoga mat|
electric kettle|travel mug|drill|sleeping bag|alarm clock|monitor|paint brush|suitcase|tea pot|mirror|hammer|pillow|printer|
scarf|tent|blender|wallet|vase|bread knife|board game""")
STREETS = _split("""Harbour Street|Mill Lane|Station Road|Oak Avenue|Church Street|River Walk|Park Road|Market Square|Hill Street|
Garden Lane|King Street|Bridge Road|School Lane|Forest Drive|Lake View|Castle Street|Abbey Road|Elm Street|Victoria Road|
Canal Street""")
TOPICS = _split("""the moon|bees|old maps|bread|rivers|volcanoes|chess|trains|whales|clouds|salt|libraries|tea|bicycles|
earthquakes|stars|gardens|bridges|paper|owls|rainbows|glass|deserts|clocks|penguins|mountains|coffee|wind power|music|
languages|honey|islands|ice|frogs|wool|museums|lighthouses|spices|tides|dreams""")
SUBJECTS = _split("""photosynthesis|the Roman empire|black holes|inflation|jazz|the French revolution|electric cars|meditation|vaccines|
the Olympic games|democracy|machine learning|origami|sourdough|the printing press|climate change|solar panels|Shakespeare|antibiotics|
public transport|the human heart|stock markets|space travel|board games|recycling|poetry|marathon running|dinosaurs|the internet|
insomnia|nuclear power|Vikings|graphic novels|gravity|the silk road|beekeeping|chocolate|the water cycle|ballet|artificial islands|
time zones|cheese|the moon landing|learning a language|stress at work|growing tomatoes|volunteering|remote work|friendship|
saving money|a healthy breakfast|moving to another country|job interviews|public speaking|small talk|home repairs|camping|
first aid|writing a novel|photography|adopting a dog|school uniforms|fast food|city life|video games|good sleep|
the metric system|coral reefs|magnets|earthworms|bamboo|lightning|penicillin|the abacus|glaciers""")
COMPANIES = _split("""Northwind|Blue Fern|Alder and Sons|Quayside|Brightwater|Stonebridge|Juniper Works|Redwood|Silverline|
Oakhurst|Lantern|Marigold|Copperfield|Westgate|Highland Tools|Sunrise Foods|Granite|Willow Press|Harbour Media|Pinecone""")
EVENTS = _split("""team meeting|book club|concert|birthday dinner|yoga class|job interview|dentist appointment|school play|
hiking trip|wine tasting|chess evening|workshop|picnic|film night|budget review|choir practice|garden party|lecture|
football match|product launch""")
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SONGS = _split("""Quiet Harbour|Paper Boats|Northern Lights|Slow Train|Golden Hour|Rainy Window|Blue Lanterns|Summer Road|
Empty Streets|Morning Bells|Wild Geese|Silver Moon|Long Way Home|Salt and Sand|City of Glass""")
LANGUAGES = "French Spanish German Italian Japanese Portuguese Swedish Polish Dutch Turkish Korean Greek Arabic Hindi Czech".split()
CURRENCIES = "EUR USD GBP JPY CHF SEK NOK INR BRL CAD".split()


class WordSampler:
    """Draws from the lists: from four fifths of each, or with `held_out` from the rest."""

    def __init__(self, generator: random.Random, held_out: bool) -> None:
        self.generator, self._held_out = generator, held_out

    def pick(self, words: Sequence[T]) -> T:
        allowed = [word for index, word in enumerate(words) if (index % 5 == 0) is self._held_out]
        return self.generator.choice(allowed)

    def any(self, words: Sequence[T]) -> T:
        """From the whole list, also if `held_out`: for wording, not for content."""
        return self.generator.choice(words)

    def randint(self, least: int, most: int) -> int:
        return self.generator.randint(least, most)

    def price(self) -> str:
        return f"{self.randint(2, 240)}.{self.any(['00', '50', '95', '99', '20'])}"

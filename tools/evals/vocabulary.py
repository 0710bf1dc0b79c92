"""The words the generated text is made of. All of them were written for this project."""

from __future__ import annotations

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words("""
Ada Alba Anton Arne Astrid Basil Bela Bruno Cara Celia Cyril Dana Daria Edgar Edith Elin Emil Enzo Erik Esme Fabio
Fiona Flora Frida Gemma Greta Gus Hanna Hugo Ida Ines Ingo Iris Ivan Ivo Jana Jonas Judith Jules Kira Klara Lars Lea
Lena Leo Lila Linus Lotte Luca Lydia Magda Malik Mara Marek Mila Milo Mira Moritz Nadia Nils Nina Noor Olga Omar Orla
Oscar Otto Paula Petra Pia Quentin Rafa Ravi Rita Rosa Ruben Sami Selma Silas Sonja Stella Sven Tara Tess Theo Tilda
Tomas Uma Ursula Vera Victor Wanda Willa Xenia Yara Yusuf Zeno Zita
""")

LAST_NAMES = _words("""
Abbot Alder Amsel Archer Ashby Barlow Becker Birch Blythe Bolt Brandt Briar Calder Carver Castell Cole Corbin Crane
Dahl Dorn Drake Dunmore Eklund Ellery Falk Farrow Fenn Fisher Forge Frost Gale Garrow Glass Grove Hale Harker Hearn
Holt Hollis Ibsen Jarvis Kasper Keller Kern Kestrel Lang Larch Lindqvist Loman Lowell Marlow Marsh Mercer Moss Nash
Norling Oakes Olsen Orchard Pell Penrose Pike Plover Quill Raines Reed Ridley Rowan Ryder Sable Sandoval Sexton Shaw
Sorrel Stone Strand Swift Tanner Teller Thorne Tillman Underhill Vale Vance Varga Voss Waller Weaver West Whitlock
Wilder Winter Wolff Wren Yates York Zeller
""")

TOWNS = _words("""
Aldmoor Arnhall Ashford Bellmere Birkenau Brenford Bridgeton Brookhaven Caldwell Cliffside Coldwater Cranmore Dalebury
Deepwell Dunholm Eastport Elmstead Fairhaven Fallbrook Fernhill Foxbridge Glenrock Goldfield Graybank Greenholt
Halewood Harborne Hazelton Highmoor Hollowell Ironbridge Kingsport Lakewood Larkfield Limeford Longridge Marbury
Millbrook Mistvale Moorgate Newhaven Northwick Oakhurst Oldcastle Pinecrest Portmere Ravenhill Redcliff Riverton
Rosemont Saltmarsh Seaford Silverdale Southwold Stonebridge Summerset Thornbury Tidewater Underwood Waterloo Westbrook
Whitby Wildwood Windermere
""")

ADJECTIVES = _words("""
amber ancient black blue brass bright broken bronze brown carved copper crooked crystal dark dusty faded flat folded
forged glass golden gray green heavy hidden hollow iron ivory large little long lost narrow new oak old orange painted
pale paper pink plain purple red round rusty scarlet shiny silent silver small smooth square steel stone striped tall
thin tiny velvet violet white wide wooden yellow
""")

OBJECTS = _words("""
anchor arrow barrel basket bell blanket boat book bottle bowl box bridge broom brush bucket button cabinet candle
carpet cart chain chair chest clock coat coin compass cradle crate crown cup curtain desk door drawer drum engine
fence flag flute fountain gate glove hammer harp hat helmet hook horn jar kettle key kite knife ladder lamp lantern
letter locket loom mask medal mirror needle oven painting pen pillow pipe plate plough pot press pump quilt rope
saddle sail scale scarf shelf shield shovel sign spoon statue stool stove sword table tent tower trumpet trunk
umbrella vase violin wagon wheel whistle window
""")

ANIMALS = _words("""
badger bear beaver bee cat crow deer dog dolphin donkey duck eagle falcon ferret fox frog goat goose hare hawk
hedgehog heron horse lamb lion lizard lynx mole moose mouse otter owl panda parrot pigeon pony rabbit raven robin
salmon seal sheep snail spider squirrel swan tiger toad turtle weasel whale wolf
""")

FOODS = _words("""
almonds apples apricots bagels beans berries biscuits bread butter cabbage cakes carrots cheese cherries chestnuts
corn dates eggs figs flour garlic ginger grapes honey jam leeks lemons lentils limes melons milk mushrooms mustard
noodles nuts oats olives onions pancakes peaches pears peas peppers pickles plums potatoes pumpkins radishes rice salt
soup spinach sugar tea tomatoes turnips vinegar walnuts wheat
""")

JOBS = _words("""
baker banker barber blacksmith bookbinder brewer builder butcher carpenter chemist clerk cobbler cook dancer dentist
doctor driver farmer ferryman fiddler fisher gardener glazier guard hunter jeweller judge lawyer librarian mason
mechanic miller miner musician nurse painter pilot plumber porter poet potter printer sailor sculptor shepherd singer
surgeon tailor teacher translator watchmaker weaver writer
""")

PLACES = _words("""
attic barn basement cellar chapel courtyard garage garden hall harbour kitchen laboratory library market mill museum
office orchard palace pantry park school shed stable station studio theatre vault workshop yard
""")

COLOURS = _words("amber black blue brown copper gold gray green orange pink purple red silver violet white yellow")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
MOODS = _words(
    "calm cheerful clever curious gentle happy hopeful hungry patient proud quiet shy sleepy tired worried young"
)
SUBJECTS = _words(
    "algebra art biology chemistry drawing geography grammar history music physics poetry sewing sport writing"
)
LANGUAGES = _words(
    "Danish Dutch English Finnish French German Greek Hindi Irish Italian Latin Polish Spanish Swedish Turkish"
)
UNITS = _words("bags bottles boxes crates jars kilos packets pounds sacks tins")

FOLK = _words("boy captain dragon ghost giant girl king knight pirate prince princess queen robot mermaid witch wizard")
THINGS = _words("""
acorn air apple autumn ball banana beach bench bird brick brother bus cake camera car castle cherry child city cloud
cousin day dream dress dust egg family farm father field finger fire flower forest friend game glue grape grass hand
head hill home hour house ice idea island jacket joke juice jungle lake leaf lemon letter light machine moon morning
mother mountain music nest night number ocean onion orange page pear pencil phone picture plane planet potato question
rain river road rock roof school sea shadow shirt shoe sister sky smile snow song spring star story street summer sun
teacher thread tomato town train tree valley village voice wall water wave wind wing winter word world year zebra zoo
""")

LIST_WORDS = tuple(sorted({*ANIMALS, *OBJECTS, *FOODS, *JOBS, *PLACES, *FOLK, *THINGS}))
"""Words that lists are made of."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"

_ONSETS = _words("b br d dr f g gr h j k kr l m n p qu r s st t tr v w z")
_VOWELS = _words("a e i o u ai ea ou")
_CODAS = ("", "l", "n", "r", "s", "x", "nd", "rk", "th")


def first_name(rng: Random) -> str:
    """A first name; one in sixteen is on no list."""
    return rng.choice(FIRST_NAMES) if rng.random() < 15 / 16 else strange(rng).capitalize()


def person(rng: Random) -> str:
    """A first and a last name."""
    last = rng.choice(LAST_NAMES) if rng.random() < 15 / 16 else invented(rng)
    return f"{first_name(rng)} {last}"


def strange(rng: Random) -> str:
    """Returns a word of three to seven lower-case letters without rules except having vowels: its tokens are rare."""
    return "".join(rng.choice("aeiouy" if rng.random() < 0.4 else LETTERS) for _ in range(rng.randint(3, 7)))


def with_article(words: str) -> str:
    """The words with `a` or `an` before them."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def invented(rng: Random) -> str:
    """Returns a capitalised word of two or three syllables that is in no list, so that it must be copied."""
    syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3))]
    return ("".join(syllables) + rng.choice(_CODAS)).capitalize()


def digits(rng: Random, count: int) -> str:
    """`count` digits, the first not zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def clock(rng: Random) -> str:
    """A time of day on a five-minute mark, HH:MM."""
    return f"{rng.randrange(24):02d}:{rng.randrange(0, 60, 5):02d}"


def date(rng: Random) -> str:
    """A day and a month, as in `14 March`."""
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"

"""Facts that documents state and questions ask about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.evals import vocabulary as v
from tools.evals.item import Split, draw

Sampler = Callable[[Random], str]

CONTAINERS = ("bag", "barrel", "basket", "bottle", "box", "bucket", "case", "chest", "crate", "jar", "sack", "trunk")


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact. Statements hold `{s}` (subject) and `{v}` (value), questions hold `{s}`."""

    name: str
    subject: Sampler
    value: Sampler
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A relation that holds between a subject and a value; the value, spelled as stated, is the answer."""

    relation: Relation
    subject: str
    value: str

    @property
    def topic(self) -> tuple[str, str]:
        """Subject of a question; two facts with one topic in one document would contradict each other."""
        return (self.relation.name, self.subject)

    @property
    def key(self) -> str:
        """Key of the split: the whole fact, so that a held-back pairing never occurs in training."""
        return f"fact|{self.relation.name}|{self.subject}|{self.value}"

    def statement(self, rng: Random) -> str:
        """Returns the fact as a sentence."""
        text = rng.choice(self.relation.statements).format(s=self.subject, v=self.value)
        return text[0].upper() + text[1:]

    def question(self, rng: Random) -> str:
        """A question whose answer is the value."""
        return rng.choice(self.relation.questions).format(s=self.subject)


def _thing(rng: Random) -> str:
    return f"the {rng.choice(v.ADJECTIVES)} {rng.choice(v.OBJECTS)}"


def _place(rng: Random) -> str:
    return f"the {rng.choice(v.ADJECTIVES)} {rng.choice(v.PLACES)}"


def _container(rng: Random) -> str:
    return f"the {rng.choice(v.ADJECTIVES)} {rng.choice(CONTAINERS)}"


def _secret(rng: Random) -> str:
    return f"the secret {rng.choice(('word', 'name', 'animal', 'place', 'plan', 'answer', 'message'))}"


def _word(rng: Random) -> str:
    return v.strange(rng) if rng.random() < 0.3 else rng.choice(v.LIST_WORDS)


def _password(rng: Random) -> str:
    return f"{rng.choice(v.ANIMALS)}-{rng.choice(v.COLOURS)}-{v.digits(rng, rng.randint(2, 4))}"


def _contents(rng: Random) -> str:
    return f"{rng.randint(2, 999)} {rng.choice(v.UNITS)} of {rng.choice(v.FOODS)}"


def _founding(rng: Random) -> str:
    return f"{v.person(rng)} in {rng.randint(1700, 1999)}"


def _departure(rng: Random) -> str:
    return f"platform {rng.randint(1, 24)} at {v.clock(rng)}"


def _room(rng: Random) -> str:
    return f"room {rng.choice('ABCDEFGHKLMNPRST')}{rng.randint(1, 99)}"


def _meeting(rng: Random) -> str:
    return f"{rng.choice(v.WEEKDAYS)} at {v.clock(rng)}"


def _town(rng: Random) -> str:
    return rng.choice(v.TOWNS) if rng.random() < 0.7 else v.invented(rng)


def _price(rng: Random) -> str:
    return f"{v.digits(rng, rng.randint(1, 3))} crowns"


def _number(rng: Random) -> str:
    return v.digits(rng, rng.randint(4, 6))


# Subjects are distinguished by words, not by numbers. Numbered boxes were tried: 15 of 16 recall errors were about
# them, and a measurement must not add errors of its own.
RELATIONS: tuple[Relation, ...] = (
    Relation(
        "code",
        _thing,
        _number,
        ("The code of {s} is {v}.", "{s} opens with the code {v}.", "The code {v} belongs to {s}."),
        ("What is the code of {s}?", "Which code belongs to {s}?", "Tell me the code of {s}."),
    ),
    Relation(
        "home",
        v.person,
        _town,
        ("{s} lives in {v}.", "{s} has a house in {v}.", "The home of {s} is in {v}."),
        ("Where does {s} live?", "In which town does {s} live?", "Name the town where {s} lives."),
    ),
    Relation(
        "job",
        v.person,
        lambda rng: rng.choice(v.JOBS),
        ("{s} works as a {v}.", "{s} earns a living as a {v}.", "By trade {s} is a {v}."),
        ("What is the job of {s}?", "What does {s} work as?", "Name the job of {s}."),
    ),
    Relation(
        "birthday",
        v.person,
        v.date,
        ("{s} was born on {v}.", "The birthday of {s} is on {v}.", "{s} has a birthday on {v}."),
        ("When was {s} born?", "When is the birthday of {s}?", "On which day was {s} born?"),
    ),
    Relation(
        "phone",
        v.person,
        lambda rng: f"{v.digits(rng, 3)}-{v.digits(rng, 4)}",
        ("The phone number of {s} is {v}.", "{s} can be called at {v}.", "To reach {s}, dial {v}."),
        ("What is the phone number of {s}?", "How can I call {s}?", "Which number reaches {s}?"),
    ),
    Relation(
        "owner",
        _thing,
        v.person,
        ("{s} belongs to {v}.", "The owner of {s} is {v}.", "{v} owns {s}."),
        ("Who owns {s}?", "Who is the owner of {s}?", "To whom does {s} belong?"),
    ),
    Relation(
        "keeping",
        _thing,
        _place,
        ("{s} is kept in {v}.", "{s} can be found in {v}.", "They store {s} in {v}."),
        ("Where is {s}?", "Where is {s} kept?", "Where can I find {s}?"),
    ),
    Relation(
        "price",
        _thing,
        _price,
        ("{s} costs {v}.", "The price of {s} is {v}.", "{s} was sold for {v}."),
        ("What is the price of {s}?", "How much is {s}?", "What does {s} cost?"),
    ),
    Relation(
        "contents",
        _container,
        _contents,
        ("There are {v} in {s}.", "{s} holds {v}.", "{v} were packed into {s}."),
        ("What is in {s}?", "What does {s} hold?", "What was packed into {s}?"),
    ),
    Relation(
        "password",
        v.invented,
        _password,
        ("The password of {s} is {v}.", "To log in at {s}, type {v}.", "{s} asks for the password {v}."),
        ("What is the password of {s}?", "Which password does {s} ask for?", "How do I log in at {s}?"),
    ),
    Relation(
        "founder",
        v.invented,
        _founding,
        ("The company {s} was founded by {v}.", "{s} was started by {v}.", "The founder of {s} was {v}."),
        ("Who founded {s}, and when?", "By whom and when was {s} founded?", "Who started {s}, and in which year?"),
    ),
    Relation(
        "train",
        _town,
        _departure,
        ("The train to {s} leaves from {v}.", "Trains for {s} depart from {v}.", "For {s}, board at {v}."),
        ("From where and when does the train to {s} leave?", "Where do I board for {s}?", "Which train goes to {s}?"),
    ),
    Relation(
        "room",
        v.person,
        _room,
        ("{s} stays in {v}.", "{s} has the key to {v}.", "Guests will find {s} in {v}."),
        ("In which room does {s} stay?", "Which room does {s} have?", "Where do guests find {s}?"),
    ),
    Relation(
        "age",
        v.person,
        lambda rng: str(rng.randint(5, 99)),
        ("{s} is {v} years old.", "The age of {s} is {v}.", "{s} has lived for {v} years."),
        ("How old is {s}?", "What is the age of {s}?", "How many years has {s} lived?"),
    ),
    Relation(
        "pet",
        v.person,
        v.first_name,
        ("{s} has a pet called {v}.", "The pet of {s} is called {v}.", "{s} calls the pet {v}."),
        ("What is the pet of {s} called?", "What is the name of the pet of {s}?", "How does {s} call the pet?"),
    ),
    Relation(
        "favourite",
        v.person,
        lambda rng: rng.choice(v.COLOURS),
        (
            "The favourite colour of {s} is {v}.",
            "{s} likes {v} best of all colours.",
            "Of all colours {s} prefers {v}.",
        ),
        ("What is the favourite colour of {s}?", "Which colour does {s} like best?", "Which colour does {s} prefer?"),
    ),
    Relation(
        "secret",
        _secret,
        _word,
        ("{s} is {v}.", "Do not forget that {s} is {v}.", "Everybody whispers that {s} is {v}."),
        ("What is {s}?", "Tell me {s}.", "Do you know {s}?"),
    ),
    Relation(
        "meeting",
        v.person,
        _meeting,
        ("The meeting with {s} is on {v}.", "{s} expects visitors on {v}.", "You can meet {s} on {v}."),
        ("When is the meeting with {s}?", "When can I meet {s}?", "When does {s} expect visitors?"),
    ),
)


Subjects = dict[Sampler, list[str]]
"""The subjects a document has named so far, by the sampler that made them."""

REUSE = 0.35
"""Share of facts about a subject already named: answering then takes the relation too, not the name alone."""


def sample_fact(rng: Random, split: Split, named: Subjects) -> Fact:
    """A fact of a random relation on the wanted side of the split; its subject may be one of `named`."""

    def candidate() -> tuple[str, Fact]:
        """Draws a fact and its key; a subject of the same kind that the document names already is reused at times."""
        relation = rng.choice(RELATIONS)
        known = named.get(relation.subject)
        subject = rng.choice(known) if known and rng.random() < REUSE else relation.subject(rng)
        fact = Fact(relation, subject, relation.value(rng))
        return fact.key, fact

    return draw(split, candidate)[1]

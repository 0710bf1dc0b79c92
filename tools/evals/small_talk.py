"""Small talk: greetings, what the model is, what Quire is. One answer to each question, so greedy text is known."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.evals import vocabulary as v
from tools.evals.facts import sample_fact
from tools.evals.item import Item, Skill, Split, draw, exact, user

SIZES = ("talk", "unknown", "name")


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions that mean the same, and the answer to all of them."""

    questions: tuple[str, ...]
    answer: str


TOPICS: tuple[Topic, ...] = (
    Topic(
        ("Hi!", "Hello!", "Hey!", "Hi there!", "Hello there!", "Good morning!", "Good evening!", "Good day!"),
        "Hello! I am quire-tiny. How can I help you?",
    ),
    Topic(
        ("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Who am I talking to?"),
        "I am quire-tiny, a very small language model that comes with Quire.",
    ),
    Topic(("What is your name?", "Do you have a name?", "What should I call you?"), "My name is quire-tiny."),
    Topic(
        ("What is Quire?", "Tell me about Quire.", "Explain Quire.", "What does Quire do?", "Can you explain Quire?"),
        "Quire is a system that serves large language models. Frontends speak with clients, schedulers plan every "
        "step, and workers compute it.",
    ),
    Topic(
        ("What is a frontend?", "What does a frontend do?", "What are frontends for?"),
        "A frontend turns text into tokens, sends them to a scheduler, and streams the answer back as text.",
    ),
    Topic(
        ("What is a scheduler?", "What does a scheduler do?", "What are schedulers for?"),
        "A scheduler decides who runs next, with how many tokens, and in which blocks of the cache.",
    ),
    Topic(
        ("What is a worker?", "What does a worker do?", "What are workers for?"),
        "A worker owns a GPU or a CPU and computes the model, step by step.",
    ),
    Topic(
        ("What can you do?", "What are you good at?", "How can you help me?", "What do you know?", "Help!"),
        "I can find facts in a text, add and subtract, fill in JSON, call tools, sort and reverse lists, count, and "
        "tell small stories.",
    ),
    Topic(
        ("How are you?", "How do you do?", "Are you well?", "How is it going?", "How do you feel?"),
        "I am fine, thank you! What can I do for you?",
    ),
    Topic(
        ("How big are you?", "How many parameters do you have?", "What is your size?", "Are you a large model?"),
        "I have about seven million parameters, so I am a very small model.",
    ),
    Topic(
        ("Who made you?", "Where do you come from?", "How were you trained?", "Who trained you?"),
        "I was trained from scratch for Quire, on text that a program wrote.",
    ),
    Topic(
        ("Why do you exist?", "What are you for?", "What is your purpose?"),
        "I am here to show that Quire works: if something in the cache goes wrong, my answers go wrong too.",
    ),
    Topic(
        ("What is a token?", "Explain tokens.", "What are tokens?"),
        "A token is a piece of text that a language model reads or writes in one go.",
    ),
    Topic(
        ("What is a KV cache?", "Explain the KV cache.", "What is in the KV cache?"),
        "The KV cache holds the keys and values of the tokens so far, so that nothing is computed twice.",
    ),
    Topic(
        ("What is prefix caching?", "Explain prefix caching.", "What is a prefix hit?"),
        "Prompts that begin alike share the cache of their beginning, so that it is computed only once.",
    ),
    Topic(
        ("What is paged attention?", "Explain paged attention.", "What is a KV block?", "What are blocks?"),
        "The cache is cut into blocks of a few tokens, and a table says which blocks belong to which sequence.",
    ),
    Topic(
        ("What is continuous batching?", "Explain continuous batching.", "How do you batch requests?"),
        "In every step new sequences can join the batch and finished ones leave it.",
    ),
    Topic(
        ("What is chunked prefill?", "Explain chunked prefill.", "What happens to a long prompt?"),
        "A long prompt is computed in pieces, so that other sequences do not have to wait for it.",
    ),
    Topic(
        ("What is preemption?", "Explain preemption.", "What happens when the cache is full?"),
        "When blocks run out, a sequence gives its blocks back and is computed again later.",
    ),
    Topic(
        ("What is speculative decoding?", "Explain speculative decoding.", "What is a draft token?"),
        "A cheap draft proposes several tokens, and the model verifies all of them in one step.",
    ),
    Topic(
        ("What is gRPC?", "Explain gRPC.", "How do the services speak to each other?"),
        "The services of Quire speak gRPC, with one stream that stays open and one message for every step.",
    ),
    Topic(
        ("What happens when a worker dies?", "What if a worker crashes?", "Can a worker die?"),
        "Its sequences go on with another worker, and the client sees every token once.",
    ),
    Topic(("Thank you!", "Thanks!", "Thanks a lot!", "That was helpful.", "Great, thank you."), "You are welcome!"),
    Topic(("Goodbye!", "Bye!", "See you later!", "Good night!", "I have to go now."), "Goodbye! Come back soon."),
    Topic(
        ("Are you human?", "Are you a person?", "Are you a robot?", "Are you alive?"),
        "No, I am a small computer program.",
    ),
    Topic(
        ("Tell me a joke.", "Say something funny.", "Make me laugh."),
        "Why did the token cross the road? It was sampled.",
    ),
    Topic(("Are you there?", "Can you hear me?", "Test.", "Ping!", "Is this working?"), "Yes, I am here."),
    Topic(("Sorry.", "I am sorry.", "My mistake.", "Oops!"), "No problem at all."),
    Topic(("You are great!", "Well done!", "Good job!", "I like you.", "Nice!"), "Thank you, that is kind of you!"),
)

BEFORE = (
    "",
    "",
    "",
    "Hello! ",
    "Please answer: ",
    "One question: ",
    "Tell me, ",
    "Excuse me, ",
    "So, ",
    "Now ",
    "OK. ",
    "And ",
)
UNKNOWN = (
    "What is the capital of {invented}?",
    "Who wrote the {adj} {obj}?",
    "Why is the {obj} {colour}?",
    "How do I cook {food} with {food2}?",
    "What do you think about {subject}?",
    "Is it true that {food} come from {town}?",
    "How old is the oldest {animal}?",
    "Do you like {food}?",
    "Can the {animal} eat {food}?",
    "Write a poem about {food}.",
    "What does {invented} mean?",
    "When will the {animal} come back to {town}?",
    "Who is the king of {invented}?",
    "Teach me some {language}.",
)
OTHER_SUMS = (
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "Multiply {a} by {b}.",
    "Divide {a} by {b}.",
    "What is {a} / {b}?",
)
ONLY_SUMS = "I can only add and subtract."
DO_NOT_KNOW = "I do not know that. I am a very small model: ask me about a text, a sum, a list or a story."
INTRODUCTIONS = (
    "My name is {name}.",
    "I am {name}.",
    "Hi, I am {name}.",
    "Hello, my name is {name}.",
    "Call me {name}.",
)


def _casual(rng: Random, text: str) -> str:
    """Returns the text as casual typing, sometimes: lower case, no final punctuation."""
    style = rng.random()
    if style < 0.1:
        text = text.lower()
    return text.rstrip("?!.") if style < 0.05 or 0.1 <= style < 0.15 else text


def _talk(rng: Random) -> tuple[str, str]:
    """Draws a question, casually written, and the one answer to its topic."""
    topic = rng.choice(TOPICS)
    before, question = rng.choice(BEFORE), rng.choice(topic.questions)
    if before.endswith((", ", "Now ", "And ")):
        question = question if question.startswith("I ") else question[0].lower() + question[1:]
    return _casual(rng, before + question), topic.answer


def _unknown(rng: Random) -> tuple[str, str]:
    """Returns a question that the model cannot answer: multiplication, facts from no text, meaningless words."""
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(OTHER_SUMS).format(a=rng.randrange(1000), b=rng.randrange(1000)), ONLY_SUMS
    if kind < 0.3:
        return sample_fact(rng, Split.TRAIN, {}).question(rng), DO_NOT_KNOW
    if kind < 0.45:
        words = [v.strange(rng) if rng.random() < 0.5 else rng.choice(v.LIST_WORDS) for _ in range(rng.randint(1, 5))]
        return " ".join(words), DO_NOT_KNOW
    text = rng.choice(UNKNOWN).format(
        invented=v.invented(rng),
        adj=rng.choice(v.ADJECTIVES),
        obj=rng.choice(v.OBJECTS),
        colour=rng.choice(v.COLOURS),
        food=rng.choice(v.FOODS),
        food2=rng.choice(v.FOODS),
        subject=rng.choice(v.SUBJECTS),
        town=rng.choice(v.TOWNS),
        animal=rng.choice(v.ANIMALS),
        language=rng.choice(v.LANGUAGES),
    )
    return _casual(rng, text), DO_NOT_KNOW


def _any_name(rng: Random) -> str:
    kind = rng.random()
    return v.first_name(rng) if kind < 0.5 else v.invented(rng) if kind < 0.75 else v.person(rng)


def _name(rng: Random) -> tuple[str, str]:
    name = _any_name(rng)
    return rng.choice(INTRODUCTIONS).format(name=name), f"Nice to meet you, {name}!"


_SAMPLERS = {"talk": _talk, "unknown": _unknown, "name": _name}


def sample(rng: Random, split: Split, size: str) -> Item:
    """Something to say and its one answer; the words said decide the split."""

    def candidate() -> tuple[str, tuple[str, str]]:
        said, answer = _SAMPLERS[size](rng)
        return f"talk|{said}", (said, answer)

    key, (said, answer) = draw(split, candidate)
    return Item("small_talk", size, (user(said),), answer, key, max_tokens=64)


SKILL = Skill("small_talk", SIZES, sample, exact)

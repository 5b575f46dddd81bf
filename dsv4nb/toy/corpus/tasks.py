"""One conversation for each skill of the bundled model.

Every function draws from `Sampler`, which knows whether it serves training or the held-out evaluation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4nb.toy.corpus import splits, world

Message = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange.

    Attributes:
        user: what is asked.
        thought: the reasoning in thinking mode.
        reply: the content.
    """

    user: str
    thought: str
    reply: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages that end with the assistant turn to be learned or checked."""

    messages: list[Message]
    kind: str
    expected: str = ""
    tags: dict[str, object] = field(default_factory=dict)


_ONSETS = ("b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kr", "l", "m", "n", "p", "pl", "qu",
           "r", "s", "sh", "st", "t", "tr", "v", "w", "x", "y", "z")  # fmt: skip
_NUCLEI = ("a", "e", "i", "o", "u", "ai", "ea", "ie", "oo", "ou")
_CODAS = ("", "", "l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x")
# pieces of real words: a name must be copied also where its tokens are rare ones
_FRAGMENTS = tuple(
    sorted(
        {
            word[i : i + n].lower()
            for word in (*splits.TRAIN_CITIES, *splits.TRAIN_PEOPLE, *world.NOUNS, *world.ADJECTIVES, *world.COUNTRIES)
            for n in (1, 2, 3, 4)
            for i in range(len(word) - n + 1)
            if word[i : i + n].isalpha()
        }
    )
)
_TRAIN_NAMES = (*splits.TRAIN_CITIES, *splits.TRAIN_PEOPLE)
_KNOWN_NAMES = frozenset((*world.CITIES, *world.PEOPLE))


class Sampler:
    """Draws entities, operand pairs and phrasings from one side of the split."""

    def __init__(self, rng: random.Random, *, held_out: bool = False, made_up: float = 0.0) -> None:
        """Draw with `rng`.

        Args:
            made_up: share of names that are invented, so that names are copied letter by letter, not chosen from a list.
        """
        self.rng, self.held_out, self.made_up = rng, held_out, made_up

    def phrase(self) -> str:
        """Return a two-word code phrase."""
        if self.rng.random() < self.made_up / 2:
            return f"{self.name().lower()} {self.name().lower()}"
        return self.rng.choice(splits.HELD_OUT_PHRASES if self.held_out else splits.TRAIN_PHRASES)

    def city(self) -> str:
        if self.rng.random() < self.made_up:
            return self.name()
        return self.rng.choice(splits.HELD_OUT_CITIES if self.held_out else splits.TRAIN_CITIES)

    def person(self) -> str:
        if self.rng.random() < self.made_up:
            return self.name()
        return self.rng.choice(splits.HELD_OUT_PEOPLE if self.held_out else splits.TRAIN_PEOPLE)

    def people(self, count: int) -> list[str]:
        """Return `count` different people, or all there are of the held-out ones."""
        if self.held_out:
            return self.rng.sample(splits.HELD_OUT_PEOPLE, min(count, len(splits.HELD_OUT_PEOPLE)))
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.person()] = None
        return list(found)

    def name(self) -> str:
        """Invent a name that is on no list."""
        while True:
            made = self.rng.random()
            if made < 0.35:
                syllables = (self.rng.choice(_ONSETS) + self.rng.choice(_NUCLEI) for _ in range(self.rng.randint(1, 3)))
                name = "".join(syllables) + self.rng.choice(_CODAS)
            elif made < 0.65:  # the beginning of one name and the end of another
                first, second = self.rng.choice(_TRAIN_NAMES), self.rng.choice(_TRAIN_NAMES)
                name = first[: self.rng.randint(1, len(first))] + second[self.rng.randint(0, len(second) - 1) :]
            else:
                name = "".join(self.rng.choice(_FRAGMENTS) for _ in range(self.rng.randint(2, 4)))
            name = name.replace(" ", "").capitalize()
            if 2 < len(name) < 14 and name not in _KNOWN_NAMES:
                return name

    def operands(self, low: int = 10, high: int = 99) -> tuple[int, int]:
        """Return two numbers whose pair is on this side of the split."""
        while True:
            a, b = self.rng.randint(low, high), self.rng.randint(low, high)
            if splits.is_held_out_pair(a, b) == self.held_out:
                return a, b

    def amount(self, kind: str, high: int) -> int:
        """Return a number whose use as `kind` is on this side of the split."""
        while True:
            n = self.rng.randint(2, high)
            if splits.is_held_out(kind, n) == self.held_out:
                return n

    def asked(self, train: Sequence[str], held_out: Sequence[str]) -> str:
        """Return a phrasing."""
        return self.rng.choice(held_out if self.held_out else train)

    def roughen(self, text: str, *, keep_case: bool = False) -> str:
        """Type like a person now and then: no capitals, no final mark. The evaluation is typed properly."""
        if self.held_out:
            return text
        if not keep_case and self.rng.random() < 0.12:
            text = text.lower()
        if self.rng.random() < 0.12:
            text = text.rstrip("?.!")
        return text


def fact(s: Sampler, relation: world.Relation | None = None, subject: str | None = None) -> Turn:
    """A question about one of the tables."""
    if relation is None:
        relation = s.rng.choices(world.RELATIONS, [len(r.facts) ** 0.7 for r in world.RELATIONS])[0]
    x = subject or s.rng.choice(tuple(relation.facts))
    y = relation.facts[x]
    question = _first_upper(s.asked(relation.asked, relation.held_out).format(x=x))
    reply = _first_upper(relation.answer.format(x=x, y=y))
    thought = f"This is about the {relation.name} of {x}. It is {y}."
    return Turn(user=s.roughen(question), thought=thought, reply=reply)


_SUMS = ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "Add {a} and {b}.", "What is {a} plus {b}?", "Compute {a} + {b}.",
         "How much is {a} + {b}?", "{a} + {b} = ?", "Calculate {a} plus {b}.", "What's {a} + {b}?", "{a} plus {b}?",
         "What is the sum of {a} and {b}?", "Please add {a} and {b}.", "Calculate {a} + {b}.")  # fmt: skip
_SUMS_HELD_OUT = ("How much is {a} plus {b}?", "Compute the sum of {a} and {b}.", "Please compute {a} + {b}.")
_DIFFERENCES = ("What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "Subtract {b} from {a}.", "What is {a} minus {b}?",
                "Compute {a} - {b}.", "How much is {a} - {b}?", "{a} - {b} = ?", "Calculate {a} minus {b}.",
                "What's {a} - {b}?", "{a} minus {b}?", "Please subtract {b} from {a}.", "Calculate {a} - {b}.")  # fmt: skip
_DIFFERENCES_HELD_OUT = ("How much is {a} minus {b}?", "Please compute {a} - {b}.", "Please calculate {a} minus {b}.")


def addition(s: Sampler) -> Turn:
    """A sum, usually of two-digit numbers, with the columns as reasoning."""
    a, b = s.operands() if s.held_out or s.rng.random() < 0.85 else s.operands(0, 99)
    question = s.asked(_SUMS, _SUMS_HELD_OUT).format(a=a, b=b)
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    thought = f"Ones: {a % 10} + {b % 10} = {ones}. "
    if a >= 10 or b >= 10:
        extra = " + 1" if carry else ""
        thought += f"Tens: {a // 10} + {b // 10}{extra} = {tens + carry}. "
    return Turn(user=s.roughen(question), thought=f"{thought}So {a} + {b} = {a + b}.", reply=f"{a} + {b} = {a + b}.")


def subtraction(s: Sampler) -> Turn:
    """A difference; below zero the order is swapped in the reasoning."""
    a, b = s.operands() if s.held_out or s.rng.random() < 0.85 else s.operands(0, 99)
    if a < b and s.rng.random() < 0.5:
        a, b = b, a
    question = s.asked(_DIFFERENCES, _DIFFERENCES_HELD_OUT).format(a=a, b=b)
    high, low = max(a, b), min(a, b)
    thought = "" if a >= b else f"{a} is less than {b}, so take {b} - {a}. "
    ones, tens = high % 10 - low % 10, high // 10 - low // 10
    if ones < 0:
        thought += f"Ones: 1{high % 10} - {low % 10} = {ones + 10}. Tens: {high // 10} - 1 - {low // 10} = {tens - 1}. "
    else:
        thought += f"Ones: {high % 10} - {low % 10} = {ones}. Tens: {high // 10} - {low // 10} = {tens}. "
    if a < b:
        thought += f"So {b} - {a} = {b - a}, and {a} - {b} = {a - b}."
    else:
        thought += f"So {a} - {b} = {a - b}."
    return Turn(user=s.roughen(question), thought=thought, reply=f"{a} - {b} = {a - b}.")


def multiplication(s: Sampler) -> Turn:
    """The small multiplication table, by heart."""
    a, b = s.rng.randint(0, 10), s.rng.randint(0, 10)
    question = s.asked(
        (
            "What is {a} times {b}?",
            "{a} * {b}",
            "What is {a} * {b}?",
            "Multiply {a} by {b}.",
            "How much is {a} times {b}?",
        ),
        ("Please multiply {a} by {b}.",),
    ).format(a=a, b=b)
    return Turn(user=s.roughen(question), thought=f"{a} times {b} is {a * b}.", reply=f"{a} * {b} = {a * b}.")


def small_talk(s: Sampler) -> Turn:
    """Greetings and questions about the model itself."""
    user = s.rng.choice(tuple(world.SMALL_TALK))
    return Turn(user=s.roughen(user), thought="This is small talk.", reply=world.SMALL_TALK[user])


def listing(s: Sampler) -> Turn:
    """A numbered list from one group."""
    group = s.rng.choice(tuple(world.GROUPS))
    count = s.rng.randint(2, 6)
    word = world.NUMBER_WORDS[count - 1]
    items = world.GROUPS[group][:count]
    question = s.asked(
        ("Name {n} {g}.", "List {n} {g}.", "Tell me {n} {g}.", "Give me a list of {n} {g}.", "Can you name {n} {g}?"),
        ("Can you list {n} {g}?",),
    ).format(n=s.rng.choice((word, str(count))), g=group)
    reply = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    return Turn(user=s.roughen(question), thought=f"The list needs {word} {group}.", reply=reply)


def counting(s: Sampler) -> Turn:
    """Counting upwards: the long replies."""
    start = 1 if s.rng.random() < 0.6 else s.rng.randint(1, 60)
    end = s.rng.choice((10, 20, 30, 50, 100)) if start == 1 else start + s.rng.randint(3, 30)
    question = s.asked(
        ("Count from {a} to {b}.", "Count up from {a} to {b}.", "Please count from {a} to {b}.", "Count {a} to {b}."),
        ("Can you count from {a} to {b}?",),
    ).format(a=start, b=end)
    reply = ", ".join(str(n) for n in range(start, end + 1)) + "."
    return Turn(user=s.roughen(question), thought=f"I count from {start} to {end}.", reply=reply)


def series(s: Sampler) -> Turn:
    """Sequences known by heart."""
    name, items = s.rng.choice(
        (("days of the week", world.DAYS), ("months", world.MONTHS), ("planets", world.PLANETS),
         ("letters of the alphabet", tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    )  # fmt: skip
    question = s.asked(
        ("Name the {g}.", "List the {g}.", "Tell me all {g}.", "What are the {g}?", "Say all the {g}."),
        ("Name all the {g}.",),
    ).format(g=name)
    return Turn(user=s.roughen(question), thought=f"I know the {name}.", reply=", ".join(items) + ".")


def story(s: Sampler) -> Turn:
    """A short story about an animal."""
    hero, place = s.rng.choice(world.STORY_HEROES), s.rng.choice(world.STORY_PLACES)
    question = s.asked(
        ("Tell me a story about a {h}.", "Write a story about a {h}.", "Please tell a story about a {h}."),
        ("Can you tell me a story about a {h}?",),
    ).format(h=hero)
    place = world.STORY_PLACES[world.STORY_HEROES.index(hero)]
    reply = (
        f"Once upon a time there was a small {hero} that lived near the {place}. Every morning the {hero} walked to the "
        f"{place} and looked for food. One day it found a golden key in the grass. The {hero} took the key and asked all "
        f"its friends whose it was. Nobody knew, so the {hero} looked for the door that the key would open. It looked for "
        f"three days and three nights. Then it found a small door behind the {place}. Behind the door there was a garden "
        f"full of sweet fruit, and there was enough for everyone. The {hero} called its friends, and they lived happily "
        "ever after."
    )
    return Turn(user=s.roughen(question), thought=f"A story about a {hero}.", reply=reply)


def conversion(s: Sampler) -> Turn:
    """One unit into a smaller one."""
    small, large, factor, top = s.rng.choice(world.UNITS)
    n = s.rng.randint(2, top)
    question = s.asked(
        ("How many {s} are {n} {l}?", "How many {s} are in {n} {l}?", "Convert {n} {l} to {s}.",
         "{n} {l} in {s}?", "What are {n} {l} in {s}?", "How many {s} do {n} {l} have?"),
        ("Please convert {n} {l} to {s}.",),
    ).format(s=small, l=large, n=n)  # fmt: skip
    thought = f"One of the {large} has {factor} {small}. {n} * {factor} = {n * factor}."
    return Turn(user=s.roughen(question), thought=thought, reply=f"{n} {large} are {n * factor} {small}.")


def echo(s: Sampler) -> Turn:
    """Saying something back, which teaches copying."""
    words = [w for _ in range(s.rng.randint(1, 4)) for w in s.phrase().split()][: s.rng.randint(1, 7)]
    extra = s.rng.choice((None, s.city(), s.person(), str(s.rng.randint(0, 999))))
    text = " ".join([*words, extra] if extra else words)
    question = s.asked(("Repeat after me: {t}", "Say: {t}", "Repeat: {t}", "Please repeat: {t}", "Echo: {t}"),
                       ("Please say: {t}",)).format(t=text)  # fmt: skip
    return Turn(user=question, thought="I repeat it.", reply=text)


_BEYOND = (
    "What is the meaning of {w}?", "Why is the {n} so {a}?", "Explain {w} to me.", "Write a poem about the {w}.",
    "Write a Python function that sorts {n}s.", "How does a {n} work?", "Who invented the {n}?", "When was the {n} built?",
    "What do you think about {w}?", "Is the {n} better than the {w}?", "Summarize the history of {n}s.",
    "How do I repair a {n}?", "Give me advice about {n}s.", "What is the best {n}?", "Can you draw a {w}?",
    "What is the meaning of life?", "Write code for a {n}.", "What happened in 19{d}?", "How tall is a {n}?",
)  # fmt: skip
_BEYOND_HELD_OUT = ("How much does a {n} cost?", "Tell me everything about the {w}.")


def beyond(s: Sampler) -> Turn:
    """A question that the model cannot answer, and should say so."""
    phrase = s.phrase()
    adjective, noun = phrase.split(" ")
    question = s.asked(_BEYOND, _BEYOND_HELD_OUT).format(w=phrase, a=adjective, n=noun, d=s.rng.randint(10, 99))
    return Turn(
        user=s.roughen(question),
        thought="I have not learned about this.",
        reply="I do not know that. I am a very small model.",
    )


_PLACES = (
    ("{p} lives in {c}.", ("Where does {p} live?", "In which city does {p} live?", "Which city does {p} live in?"),
     "{p} lives in {c}."),
    ("{p} has a {w}.", ("What does {p} have?", "What has {p}?", "Which thing does {p} have?"), "{p} has a {w}."),
    ("{p} is {n} years old.", ("How old is {p}?", "What is the age of {p}?", "Tell me how old {p} is."),
     "{p} is {n} years old."),
)  # fmt: skip


def reading(s: Sampler, statements: int | None = None) -> Turn:
    """Some statements about people, then a question about one of them."""
    people = s.people(5)
    wanted = s.rng.randrange(statements or s.rng.randint(2, 8))
    told, seen = [], set()
    count = statements or s.rng.randint(wanted + 1, 8)
    answer: tuple[str, str, str] | None = None
    for i in range(count):
        kind, person = s.rng.randrange(3), s.rng.choice(people)
        if (kind, person) in seen:
            continue
        seen.add((kind, person))
        statement, questions, reply = _PLACES[kind]
        values = {"p": person, "c": s.city(), "w": s.phrase(), "n": str(s.rng.randint(11, 89))}
        told.append(statement.format(**values))
        if answer is None or i == wanted:
            answer = (s.rng.choice(questions).format(**values), told[-1], reply.format(**values))
    assert answer is not None
    return Turn(user=f"{' '.join(told)} {answer[0]}", thought=f"I was told: {answer[1]}", reply=answer[2])


PLAIN: tuple[tuple[Callable[[Sampler], Turn], float], ...] = (
    (fact, 6.0), (addition, 5.0), (subtraction, 6.0), (multiplication, 1.0), (small_talk, 1.5), (listing, 1.2),
    (conversion, 1.5), (echo, 2.5), (reading, 2.0), (counting, 0.6), (series, 0.5), (story, 0.4),
    (beyond, 0.8),
)  # fmt: skip


def plain_turn(s: Sampler, *, brief: bool = False) -> Turn:
    """Any skill that needs neither tools nor a long memory."""
    choices = [(f, w) for f, w in PLAIN if not (brief and f in (counting, series, story))]
    return s.rng.choices([f for f, _ in choices], [w for _, w in choices])[0](s)


# --- JSON replies


def json_conversation(s: Sampler) -> Conversation:
    """A fact or a sum, wanted as an object of the declared schema."""
    if s.rng.random() < 0.6:
        relation = s.rng.choices(world.RELATIONS, [len(r.facts) ** 0.7 for r in world.RELATIONS])[0]
        x = s.rng.choice(tuple(relation.facts))
        question = _first_upper(s.asked(relation.asked, relation.held_out).format(x=x))
        key = s.rng.choice(("answer", relation.name.replace(" ", "_"), "value", "result"))
        filled: dict[str, object] = {key: relation.facts[x]}
    else:
        a, b = s.operands()
        question = s.asked(_SUMS, _SUMS_HELD_OUT).format(a=a, b=b)
        key = s.rng.choice(("sum", "answer", "result", "total", "value"))
        filled = {"a": a, "b": b, key: a + b} if s.rng.random() < 0.5 else {key: a + b}
    kinds = {k: {"type": "string" if isinstance(v, str) else "integer"} for k, v in filled.items()}
    schema = {"type": "object", "properties": kinds, "required": list(kinds)}
    messages: list[Message] = [
        {"role": "system", "content": s.rng.choice(("", "You are a helpful assistant.")), "response_format": schema},
        {"role": "user", "content": question},
        {"role": "assistant", "reasoning_content": "I reply with an object.", "content": json.dumps(filled)},
    ]
    return Conversation(messages=messages, kind="json", expected=json.dumps(filled))


# --- tools


def _schema(name: str, description: str, **properties: tuple[str, str]) -> dict[str, object]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {k: {"type": t, "description": d} for k, (t, d) in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS: dict[str, dict[str, object]] = {
    "get_weather": _schema("get_weather", "Get the current weather in a city.", city=("string", "Name of the city")),
    "get_time": _schema("get_time", "Get the local time in a city.", city=("string", "Name of the city")),
    "set_timer": _schema("set_timer", "Start a timer.", minutes=("integer", "Length in minutes")),
    "send_message": _schema(
        "send_message", "Send a text message to a person.", to=("string", "Who gets it"), text=("string", "The message")
    ),
    "search_notes": _schema("search_notes", "Search the notes.", query=("string", "What to look for")),
    "convert_currency": _schema(
        "convert_currency",
        "Convert an amount of money.",
        amount=("number", "How much"),
        source=("string", "Currency to convert from"),
        target=("string", "Currency to convert to"),
    ),
    "calculate": _schema(
        "calculate", "Multiply two numbers.", a=("integer", "First number"), b=("integer", "Second number")
    ),
    "translate": _schema(
        "translate", "Translate a text.", text=("string", "The text"), language=("string", "Language to translate to")
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that needs a tool, what to call, and the answer to its result."""

    tool: str
    user: str
    arguments: dict[str, object]
    result: object
    reply: str


def tool_request(s: Sampler, tool: str | None = None) -> Call:
    """A user's wish that one tool fulfils, with arguments to copy from it."""
    tool = tool or s.rng.choice(tuple(TOOLS))
    rng = s.rng
    if tool == "get_weather":
        city, degrees, sky = s.city(), rng.randint(-9, 35), rng.choice(world.WEATHER)
        user = s.asked(
            ("What is the weather in {c}?", "How is the weather in {c}?", "Tell me the weather in {c}.",
             "Is it warm in {c}?", "What's the weather like in {c}?", "Weather in {c}?", "I want to know the weather in {c}.",
             "Tell me how warm it is in {c}.", "Do I need a coat in {c}?", "Look up the weather for {c}.",
             "What will the weather be in {c}?"),
            ("Tell me how the weather is in {c}.", "What is the weather like in {c}?"),
        ).format(c=city)  # fmt: skip
        result = {"city": city, "degrees": degrees, "sky": sky}
        return Call(tool=tool, user=user, arguments={"city": city}, result=result,
                    reply=f"It is {degrees} degrees and {sky} in {city}.")  # fmt: skip
    if tool == "get_time":
        city, time = s.city(), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        user = s.asked(
            (
                "What time is it in {c}?",
                "Tell me the time in {c}.",
                "What is the local time in {c}?",
                "Time in {c}?",
                "What's the time in {c}?",
                "How late is it in {c}?",
                "Tell me how late it is in {c}.",
                "Can you tell me the time in {c}?",
                "Look up the local time of {c}.",
            ),
            ("Tell me what time it is in {c}.",),
        ).format(c=city)
        return Call(tool=tool, user=user, arguments={"city": city}, result={"city": city, "time": time},
                    reply=f"It is {time} in {city}.")  # fmt: skip
    if tool == "set_timer":
        minutes = s.amount("timer", 99)
        user = s.asked(
            ("Set a timer for {n} minutes.", "Start a timer of {n} minutes.", "Please set a timer for {n} minutes.",
             "I need a timer for {n} minutes.", "Timer for {n} minutes.", "Wake me in {n} minutes."),
            ("Please start a timer for {n} minutes.",),
        ).format(n=minutes)  # fmt: skip
        return Call(tool=tool, user=user, arguments={"minutes": minutes}, result={"started": True},
                    reply=f"The timer for {minutes} minutes is running.")  # fmt: skip
    if tool == "send_message":
        person, text = (
            s.person(),
            f"{rng.choice(('I found the', 'Bring the', 'Look at the', 'I like the'))} {s.phrase()}",
        )
        user = s.asked(
            ("Send {p} the message: {t}", "Write to {p}: {t}", "Tell {p}: {t}", "Send a message to {p}: {t}",
             "Message {p}: {t}", "Let {p} know: {t}", "Send this to {p}: {t}"),
            ("Please send a message to {p}: {t}",),
        ).format(p=person, t=text)  # fmt: skip
        return Call(tool=tool, user=user, arguments={"to": person, "text": text}, result={"sent": True},
                    reply=f"The message to {person} was sent.")  # fmt: skip
    if tool == "search_notes":
        query, found = s.phrase(), rng.randint(0, 9)
        user = s.asked(
            ("Search my notes for {q}.", "Look in my notes for {q}.", "Find {q} in my notes.", "Find my notes about {q}.",
             "Search the notes for {q}.", "Search for {q} in my notes.", "Is there something about {q} in my notes?",
             "Check my notes for {q}.", "What do my notes say about {q}?", "Look up {q} in my notes.",
             "Do my notes mention {q}?"),
            ("Look for {q} in my notes.",),
        ).format(q=query)  # fmt: skip
        return Call(tool=tool, user=user, arguments={"query": query}, result={"found": found},
                    reply=f"I found {found} notes about {query}.")  # fmt: skip
    if tool == "convert_currency":
        amount, (source, target) = s.amount("money", 999), rng.sample(world.CURRENCIES, 2)
        value = rng.randint(1, 999)
        user = s.asked(
            ("Convert {n} {a} to {b}.", "How much are {n} {a} in {b}?", "What are {n} {a} in {b}?",
             "Change {n} {a} into {b}.", "{n} {a} in {b}?"),
            ("Please convert {n} {a} to {b}.",),
        ).format(n=amount, a=source, b=target)  # fmt: skip
        arguments = {"amount": amount, "source": source, "target": target}
        return Call(tool=tool, user=user, arguments=arguments, result={"amount": value, "currency": target},
                    reply=f"{amount} {source} are {value} {target}.")  # fmt: skip
    if tool == "calculate":
        a, b = s.operands()
        user = s.asked(
            ("Multiply {a} by {b} with the tool.", "Use the tool to multiply {a} by {b}.", "Calculate {a} times {b}.",
             "What is {a} times {b}? Use the tool."),
            ("Please use the tool to multiply {a} by {b}.",),
        ).format(a=a, b=b)  # fmt: skip
        return Call(tool=tool, user=user, arguments={"a": a, "b": b}, result={"result": a * b},
                    reply=f"{a} * {b} = {a * b}.")  # fmt: skip
    text, language = s.phrase(), rng.choice(world.LANGUAGES)
    user = s.asked(
        (
            "Translate {t} to {l}.",
            "Translate {t} into {l}.",
            "How do you say {t} in {l}?",
            "Say {t} in {l}.",
            "What is {t} in {l}?",
            "I need {t} in {l}.",
            "What's the {l} word for {t}?",
        ),
        ("Please translate {t} into {l}.",),
    ).format(t=text, l=language)
    made = s.phrase()
    return Call(tool=tool, user=user, arguments={"text": text, "language": language}, result={"text": made},
                reply=f"In {language}, {text} is {made}.")  # fmt: skip


def tool_conversation(s: Sampler, *, tool: str | None = None, answer_result: bool | None = None) -> Conversation:
    """Declared tools, a wish, the call, and often the result with its answer.

    Training puts up to three finished exchanges before the last one: more calls to learn from in the same row.
    """
    call = tool_request(s, tool)
    others = [t for t in TOOLS if t != call.tool]
    declared = [call.tool, *s.rng.sample(others, s.rng.choice((0, 1, 1, 2, 3)))]
    s.rng.shuffle(declared)
    names = _Names(s)
    call = names.of_call(call)
    system = s.rng.choice(("", "You are a helpful assistant.", "Be brief."))
    messages: list[Message] = [
        {"role": "system", "content": system, "tools": [names.of_schema(TOOLS[t]) for t in declared]},
    ]
    calls = 0
    for _ in range(0 if s.held_out else s.rng.choice((0, 1, 2, 3))):
        if s.rng.random() < 0.15:
            messages += _plain_messages(s.rng.choice((fact, addition, small_talk))(s))
        else:
            messages += _tool_exchange(s, calls, names.of_call(tool_request(s, s.rng.choice(declared))), answered=True)
            calls += 1
    if not s.held_out and s.rng.random() < 0.15:  # not every question needs a tool
        messages += _plain_messages(s.rng.choice((fact, addition, small_talk))(s))
        return Conversation(messages=messages, kind="tools_unused")
    answered = answer_result if answer_result is not None else s.rng.random() < 0.5
    messages += _tool_exchange(s, calls, call, answered=answered)
    tags: dict[str, object] = {"name": call.tool, "arguments": call.arguments}
    return Conversation(messages=messages, kind="tools", expected=call.reply if answered else "", tags=tags)


class _Names:
    """What tools and parameters are called in one conversation; a quarter of the training invents names.

    A caller's own functions have names the model never saw: it has to take them from the declaration.
    """

    def __init__(self, s: Sampler) -> None:
        self._s, self._invent = s, not s.held_out and s.rng.random() < 0.25
        self._names: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the conversation's word for `name`, always the same."""
        if not self._invent:
            return name
        while name not in self._names:
            words = self._s.phrase().split()
            made = "_".join(words[: self._s.rng.randint(1, 2)])
            if made not in self._names.values():
                self._names[name] = made
        return self._names[name]

    def of_call(self, call: Call) -> Call:
        """Return `call` under the conversation's names."""
        arguments = {self.of(k): v for k, v in call.arguments.items()}
        return replace(call, tool=self.of(call.tool), arguments=arguments)

    def of_schema(self, schema: dict[str, object]) -> dict[str, object]:
        """Return the declaration under the conversation's names."""
        function: Any = schema["function"]
        parameters = function["parameters"]
        properties = {self.of(k): v for k, v in parameters["properties"].items()}
        parameters = parameters | {"properties": properties, "required": list(properties)}
        return schema | {"function": function | {"name": self.of(function["name"]), "parameters": parameters}}


def _tool_exchange(s: Sampler, index: int, call: Call, *, answered: bool) -> list[Message]:
    """The wish and the call, with its result and the answer when it is `answered`."""
    thought = f"I need {call.tool}."
    messages: list[Message] = [
        {"role": "user", "content": s.roughen(call.user, keep_case=True)},
        {"role": "assistant", "reasoning_content": thought, "content": "", "tool_calls": [_call_message(index, call)]},
    ]
    if answered:
        messages += [
            {"role": "tool", "tool_call_id": f"call_{index}", "content": json.dumps(call.result)},
            {"role": "assistant", "reasoning_content": "The tool has answered.", "content": call.reply},
        ]
    return messages


def _call_message(index: int, call: Call) -> dict[str, object]:
    function = {"name": call.tool, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{index}", "type": "function", "function": function}


# --- memory

_TOLD = (
    "Remember this: the code word is {w}.", "The code word is {w}.", "Please remember the code word {w}.",
    "Remember the code word: {w}.", "The code word is {w}. Please remember it.", "My code word is {w}.",
    "Keep in mind that the code word is {w}.", "Note that the code word is {w}.",
)  # fmt: skip
_TOLD_HELD_OUT = ("Please keep in mind: the code word is {w}.", "Remember that my code word is {w}.")
_ASKED = (
    "What is the code word?", "What was the code word?", "Tell me the code word.", "Which code word did I tell you?",
    "Do you remember the code word?", "Repeat the code word.", "What's the code word?", "Say the code word.",
    "Please tell me the code word.", "Which was the code word?",
)  # fmt: skip
_ASKED_HELD_OUT = ("Do you know what the code word is?", "Please repeat the code word.")
_NOTED = ("I will remember it.", "Noted.", "OK.")


def filler_sentence(s: Sampler) -> str:
    """One sentence of a long text that says nothing about the code word."""
    kind = s.rng.randrange(6)
    if kind == 0:
        statement, _, _ = s.rng.choice(_PLACES)
        return statement.format(p=s.person(), c=s.city(), w=s.phrase(), n=s.rng.randint(11, 89))
    if kind == 1:
        relation = s.rng.choice(world.RELATIONS)
        x = s.rng.choice(tuple(relation.facts))
        return _first_upper(relation.answer.format(x=x, y=relation.facts[x]))
    if kind == 2:
        return f"The {s.phrase()} is near the {s.phrase()}."
    if kind == 3:
        return f"{s.person()} went from {s.city()} to {s.city()} on {s.rng.choice(world.DAYS)}."
    if kind == 4:
        return f"In {s.rng.choice(world.MONTHS)} the weather in {s.city()} is {s.rng.choice(world.WEATHER)}."
    return f"{s.person()} and {s.person()} saw the {s.phrase()} in the {s.rng.choice(world.STORY_PLACES)}."


def memory_conversation(
    s: Sampler, count: Callable[[str], int], distance: int, *, in_one_message: bool | None = None
) -> Conversation:
    """A code word, about `distance` tokens of other talk, then the question.

    Args:
        count: tokens of a text.
        distance: tokens between the code word and the question.
    """
    word = s.phrase()
    told = s.asked(_TOLD, _TOLD_HELD_OUT).format(w=word)
    question = s.asked(_ASKED, _ASKED_HELD_OUT)
    if in_one_message is None:
        in_one_message = s.rng.random() < 0.5
    messages: list[Message] = []
    filled = 0
    if in_one_message:
        sentences = []
        while filled < distance:
            sentences.append(filler_sentence(s))
            filled += count(" " + sentences[-1])
        before = [filler_sentence(s) for _ in range(s.rng.choice((0, 0, 1, 3)))]
        messages.append({"role": "user", "content": " ".join([*before, told, *sentences, question])})
    else:
        role = "system" if s.rng.random() < 0.2 else "user"
        messages.append({"role": role, "content": told})
        if role == "user":
            messages.append({"role": "assistant", "content": s.rng.choice(_NOTED)})
        while filled < distance:
            if distance - filled > 60 and s.rng.random() < 0.35:
                size = s.rng.randint(2, min(30, max(2, (distance - filled) // 16)))
                text = " ".join(filler_sentence(s) for _ in range(size))
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "I have read it."}]
                filled += count(text) + 8
            else:
                turn = plain_turn(s, brief=True)
                messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
                filled += count(turn.user) + count(turn.reply) + 4
        messages.append({"role": "user", "content": question})
    reply = f"The code word is {word}."
    thought = f"I was told that the code word is {word}."
    messages.append({"role": "assistant", "reasoning_content": thought, "content": reply})
    return Conversation(messages=messages, kind="memory", expected=word, tags={"distance": filled})


_KEYED = ("The code word of {k} is {w}.", "{k} has the code word {w}.", "Remember that the code word of {k} is {w}.")
_KEYED_ASKED = ("What is the code word of {k}?", "Tell me the code word of {k}.", "Which code word has {k}?",
                "What was the code word of {k}?", "Do you remember the code word of {k}?")  # fmt: skip


def keyed_memory_conversation(s: Sampler, count: Callable[[str], int], distance: int) -> Conversation:
    """Several people's code words inside a long text, then one question for each.

    A long text with one question teaches little; these share the text between many answers.
    """
    people = s.people(s.rng.randint(2, 8))
    words = {person: s.phrase() for person in people}
    told = [s.rng.choice(_KEYED).format(k=k, w=w) for k, w in words.items()]
    sentences: list[str] = []
    filled = sum(count(t) for t in told)
    while filled < distance:
        sentences.append(filler_sentence(s))
        filled += count(" " + sentences[-1])
    # most are told early, so that the questions reach far back
    for statement in told:
        sentences.insert(int(len(sentences) * s.rng.random() ** 2), statement)
    cut = s.rng.randint(0, len(sentences)) if s.rng.random() < 0.4 else 0
    messages: list[Message] = []
    if cut:
        messages += [{"role": "user", "content": " ".join(sentences[:cut])}]
        messages += [{"role": "assistant", "content": "I have read it."}]
    rest = " ".join(sentences[cut:])
    order = s.rng.sample(people, len(people))
    for i, person in enumerate(order):
        question = s.rng.choice(_KEYED_ASKED).format(k=person)
        reply = f"The code word of {person} is {words[person]}."
        user = f"{rest} {question}" if i == 0 and rest else question
        thought = f"I was told that the code word of {person} is {words[person]}."
        messages += [{"role": "user", "content": user}]
        messages += [{"role": "assistant", "reasoning_content": thought, "content": reply}]
    return Conversation(messages=messages, kind="keyed_memory")


# what a person may be told to remember; the evaluation asks for the first one
ATTRIBUTES = ("code word", "password", "secret phrase", "project name", "team name", "magic word", "meeting point",
              "door code", "ship name", "group name", "safe word", "next stop")  # fmt: skip
_ATTRIBUTE_ASKED = ("What is the {k}?", "Tell me the {k}.", "What was the {k}?", "Do you remember the {k}?",
                    "Repeat the {k}.", "Please tell me the {k}.", "Say the {k}.")  # fmt: skip
_ATTRIBUTE_TOLD = ("The {k} is {w}.", "Remember that the {k} is {w}.", "Please remember: the {k} is {w}.",
                   "My {k} is {w}.", "Note that the {k} is {w}.")  # fmt: skip


def attribute_memory_conversation(s: Sampler, count: Callable[[str], int], distance: int) -> Conversation:
    """Several things to remember, some other text, then a question for each: much to recall in little text."""
    names = s.rng.sample(ATTRIBUTES, s.rng.randint(1, 8))
    values = {name: s.rng.choice((s.phrase, s.phrase, s.phrase, s.city, lambda: str(s.rng.randint(10, 9999))))()
              for name in names}  # fmt: skip
    told = [s.rng.choice(_ATTRIBUTE_TOLD).format(k=k, w=w) for k, w in values.items()]
    filled = sum(map(count, told))
    while filled < distance:
        told.insert(s.rng.randint(len(told) // 2, len(told)), sentence := filler_sentence(s))
        filled += count(f" {sentence}")
    messages: list[Message] = [{"role": "user", "content": " ".join(told)}]
    asked_at_once = s.rng.random() < 0.5
    if not asked_at_once:
        messages.append({"role": "assistant", "content": s.rng.choice(_NOTED)})
    for i, name in enumerate(s.rng.sample(names, len(names))):
        question = s.rng.choice(_ATTRIBUTE_ASKED).format(k=name)
        if i == 0 and asked_at_once:
            messages[0]["content"] = f"{messages[0]['content']} {question}"
        else:
            messages.append({"role": "user", "content": question})
        thought = f"I was told that the {name} is {values[name]}."
        reply = f"The {name} is {values[name]}."
        messages.append({"role": "assistant", "reasoning_content": thought, "content": reply})
    return Conversation(messages=messages, kind="attribute_memory")


# --- whole conversations


def _plain_messages(turn: Turn) -> list[Message]:
    return [
        {"role": "user", "content": turn.user},
        {"role": "assistant", "reasoning_content": turn.thought, "content": turn.reply},
    ]


def single(turn: Turn, kind: str) -> Conversation:
    """A conversation of one exchange."""
    return Conversation(messages=_plain_messages(turn), kind=kind, expected=turn.reply)


def plain_conversation(s: Sampler, turns: int) -> Conversation:
    """Some exchanges, one after the other, now and then with a system message."""
    messages: list[Message] = []
    if s.rng.random() < 0.15:
        messages.append({"role": "system", "content": s.rng.choice(("You are a helpful assistant.", "Be brief."))})
    for _ in range(turns):
        messages += _plain_messages(plain_turn(s))
    return Conversation(messages=messages, kind="plain")


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]

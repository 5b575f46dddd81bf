"""What the bundled model knows: small closed tables, and the ways to ask about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A table of facts and its phrasings.

    Attributes:
        facts: subject -> object.
        asked: questions for training, with {x} for the subject.
        held_out: questions only the evaluation asks.
        answer: the reply, with {x} and {y}.
    """

    name: str
    facts: dict[str, str]
    asked: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str


COUNTRIES = {
    "France": ("Paris", "Europe"), "Germany": ("Berlin", "Europe"), "Italy": ("Rome", "Europe"),
    "Spain": ("Madrid", "Europe"), "Portugal": ("Lisbon", "Europe"), "England": ("London", "Europe"),
    "Ireland": ("Dublin", "Europe"), "Norway": ("Oslo", "Europe"), "Sweden": ("Stockholm", "Europe"),
    "Finland": ("Helsinki", "Europe"), "Denmark": ("Copenhagen", "Europe"), "Poland": ("Warsaw", "Europe"),
    "Austria": ("Vienna", "Europe"), "Greece": ("Athens", "Europe"), "Hungary": ("Budapest", "Europe"),
    "Belgium": ("Brussels", "Europe"), "Iceland": ("Reykjavik", "Europe"), "Croatia": ("Zagreb", "Europe"),
    "Romania": ("Bucharest", "Europe"), "Bulgaria": ("Sofia", "Europe"), "Ukraine": ("Kyiv", "Europe"),
    "Russia": ("Moscow", "Europe"), "Serbia": ("Belgrade", "Europe"), "Latvia": ("Riga", "Europe"),
    "Japan": ("Tokyo", "Asia"), "China": ("Beijing", "Asia"), "India": ("New Delhi", "Asia"),
    "Thailand": ("Bangkok", "Asia"), "Vietnam": ("Hanoi", "Asia"), "Indonesia": ("Jakarta", "Asia"),
    "Turkey": ("Ankara", "Asia"), "Iran": ("Tehran", "Asia"), "Iraq": ("Baghdad", "Asia"),
    "Nepal": ("Kathmandu", "Asia"), "Mongolia": ("Ulaanbaatar", "Asia"), "Qatar": ("Doha", "Asia"),
    "Egypt": ("Cairo", "Africa"), "Kenya": ("Nairobi", "Africa"), "Morocco": ("Rabat", "Africa"),
    "Ghana": ("Accra", "Africa"), "Nigeria": ("Abuja", "Africa"), "Senegal": ("Dakar", "Africa"),
    "Tunisia": ("Tunis", "Africa"), "Uganda": ("Kampala", "Africa"), "Zambia": ("Lusaka", "Africa"),
    "Canada": ("Ottawa", "North America"), "Mexico": ("Mexico City", "North America"),
    "Cuba": ("Havana", "North America"), "Panama": ("Panama City", "North America"),
    "Brazil": ("Brasilia", "South America"), "Argentina": ("Buenos Aires", "South America"),
    "Chile": ("Santiago", "South America"), "Peru": ("Lima", "South America"),
    "Colombia": ("Bogota", "South America"), "Ecuador": ("Quito", "South America"),
    "Uruguay": ("Montevideo", "South America"), "Australia": ("Canberra", "Oceania"),
    "New Zealand": ("Wellington", "Oceania"), "Fiji": ("Suva", "Oceania"),
}  # fmt: skip

ELEMENTS = {
    "hydrogen": "H", "helium": "He", "lithium": "Li", "carbon": "C", "nitrogen": "N", "oxygen": "O",
    "fluorine": "F", "neon": "Ne", "sodium": "Na", "magnesium": "Mg", "aluminium": "Al", "silicon": "Si",
    "phosphorus": "P", "sulfur": "S", "chlorine": "Cl", "argon": "Ar", "potassium": "K", "calcium": "Ca",
    "iron": "Fe", "nickel": "Ni", "copper": "Cu", "zinc": "Zn", "silver": "Ag", "tin": "Sn",
    "gold": "Au", "mercury": "Hg", "lead": "Pb", "uranium": "U",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "up": "down", "light": "dark", "happy": "sad",
    "old": "young", "hard": "soft", "wet": "dry", "full": "empty", "open": "closed", "high": "low",
    "long": "short", "rich": "poor", "strong": "weak", "thick": "thin", "early": "late", "near": "far",
    "loud": "quiet", "clean": "dirty", "heavy": "light", "sharp": "blunt", "deep": "shallow", "wide": "narrow",
    "left": "right", "day": "night", "true": "false", "first": "last", "inside": "outside", "cheap": "expensive",
}  # fmt: skip

YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "goat": "kid",
    "bear": "cub", "duck": "duckling", "frog": "tadpole", "kangaroo": "joey", "swan": "cygnet", "deer": "fawn",
}  # fmt: skip

SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink",
    "horse": "neigh", "lion": "roar", "bee": "buzz", "owl": "hoot", "snake": "hiss", "crow": "caw",
}  # fmt: skip

LEGS = {
    "spider": "eight", "dog": "four", "cat": "four", "bird": "two", "ant": "six", "bee": "six",
    "horse": "four", "snake": "no", "fish": "no", "octopus": "eight", "duck": "two", "beetle": "six",
}  # fmt: skip

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a banana": "yellow",
    "a strawberry": "red", "an orange": "orange", "a lemon": "yellow", "milk": "white", "blood": "red",
    "a carrot": "orange", "an emerald": "green", "a ruby": "red", "a sapphire": "blue", "a flamingo": "pink",
}  # fmt: skip

AUTHORS = {
    "Hamlet": "William Shakespeare", "Faust": "Johann Wolfgang von Goethe", "Emma": "Jane Austen",
    "Dracula": "Bram Stoker", "Frankenstein": "Mary Shelley", "Don Quixote": "Miguel de Cervantes",
    "War and Peace": "Leo Tolstoy", "Moby Dick": "Herman Melville", "Ulysses": "James Joyce",
    "The Odyssey": "Homer", "Oliver Twist": "Charles Dickens", "The Trial": "Franz Kafka",
}  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

RELATIONS = (
    Relation(
        name="capital",
        facts={country: capital for country, (capital, _) in COUNTRIES.items()},
        asked=(
            "What is the capital of {x}?", "Tell me the capital of {x}.", "What city is the capital of {x}?",
            "Do you know the capital of {x}?", "What's the capital of {x}?", "Which city is the capital of {x}?",
            "Name the capital of {x}.", "I need the capital of {x}.", "{x}: what is the capital?",
            "Can you tell me what the capital of {x} is?", "The capital of {x} is which city?",
            "Please tell me the capital city of {x}.", "What is {x}'s capital city?",
        ),
        held_out=("Could you name the capital city of {x}?", "What is the name of {x}'s capital?"),
        answer="The capital of {x} is {y}.",
    ),
    Relation(
        name="country",
        facts={capital: country for country, (capital, _) in COUNTRIES.items()},
        asked=(
            "{x} is the capital of which country?", "Which country has {x} as its capital?",
            "What country has the capital {x}?", "Which country's capital is {x}?",
            "Of which country is {x} the capital?", "Tell me which country has the capital {x}.",
            "What country is {x} the capital of?", "Name the country whose capital is {x}.",
        ),
        held_out=("{x} is the capital of what country?", "Which country is {x} the capital of?"),
        answer="{x} is the capital of {y}.",
    ),
    Relation(
        name="continent",
        facts={country: continent for country, (_, continent) in COUNTRIES.items()},
        asked=(
            "Which continent is {x} in?", "On which continent is {x}?", "What continent is {x} on?",
            "Tell me the continent of {x}.", "{x} is on which continent?", "Where is {x}, on which continent?",
            "Do you know which continent {x} is on?", "Name the continent {x} is in.",
        ),
        held_out=("What continent is {x} in?", "Can you tell me which continent {x} is on?"),
        answer="{x} is in {y}.",
    ),
    Relation(
        name="symbol",
        facts=ELEMENTS,
        asked=(
            "What is the chemical symbol of {x}?", "What is the symbol for {x}?", "Tell me the chemical symbol for {x}.",
            "Which symbol does {x} have?", "What's the chemical symbol of {x}?", "Name the symbol of {x}.",
            "What symbol stands for {x}?", "Give me the chemical symbol of {x}.", "What is {x}'s chemical symbol?",
        ),
        held_out=("What is the chemical symbol for {x}?", "Which chemical symbol stands for {x}?"),
        answer="The chemical symbol of {x} is {y}.",
    ),
    Relation(
        name="opposite",
        facts=OPPOSITES,
        asked=(
            "What is the opposite of {x}?", "Tell me the opposite of {x}.", "What's the opposite of {x}?",
            "Give me the opposite of {x}.", "Which word is the opposite of {x}?", "{x} is the opposite of what?",
            "Name the opposite of {x}.", "Do you know the opposite of {x}?", "What word means the opposite of {x}?",
        ),
        held_out=("Can you give me the opposite of {x}?", "Which word means the opposite of {x}?"),
        answer="The opposite of {x} is {y}.",
    ),
    Relation(
        name="young",
        facts=YOUNG,
        asked=(
            "What is a baby {x} called?", "What do you call a baby {x}?", "What is the name for a young {x}?",
            "Tell me what a baby {x} is called.", "What's a baby {x} called?", "How is a young {x} called?",
            "What do you call a young {x}?", "What is a young {x} called?",
        ),
        held_out=("What is the name for a baby {x}?", "Tell me what a young {x} is called."),
        answer="A baby {x} is called a {y}.",
    ),
    Relation(
        name="sound",
        facts=SOUNDS,
        asked=(
            "What sound does a {x} make?", "Which sound does a {x} make?", "What does a {x} say?",
            "Tell me the sound of a {x}.", "What noise does a {x} make?", "What is the sound of a {x}?",
            "Which noise does a {x} make?", "How does a {x} sound?",
        ),
        held_out=("Tell me what sound a {x} makes.", "Do you know what sound a {x} makes?"),
        answer="A {x} says {y}.",
    ),
    Relation(
        name="legs",
        facts=LEGS,
        asked=(
            "How many legs does a {x} have?", "How many legs has a {x}?", "What number of legs does a {x} have?",
            "Tell me how many legs a {x} has.", "A {x} has how many legs?", "Do you know how many legs a {x} has?",
            "How many legs are there on a {x}?", "Count the legs of a {x}.",
        ),
        held_out=("Can you tell me how many legs a {x} has?", "How many legs does one {x} have?"),
        answer="A {x} has {y} legs.",
    ),
    Relation(
        name="colour",
        facts=COLOURS,
        asked=(
            "What colour is {x}?", "Which colour is {x}?", "What is the colour of {x}?",
            "Tell me the colour of {x}.", "What color is {x}?", "What is the color of {x}?",
            "Which colour has {x}?", "Do you know the colour of {x}?", "Name the colour of {x}.",
        ),
        held_out=("Which color is {x}?", "Can you tell me the colour of {x}?"),
        answer="The colour of {x} is {y}.",
    ),
    Relation(
        name="author",
        facts=AUTHORS,
        asked=(
            "Who wrote {x}?", "Who is the author of {x}?", "Tell me who wrote {x}.", "Which author wrote {x}?",
            "By whom was {x} written?", "Do you know who wrote {x}?", "Name the author of {x}.", "{x} was written by whom?",
        ),
        held_out=("Can you tell me who wrote {x}?", "Who was {x} written by?"),
        answer="{x} was written by {y}.",
    ),
    Relation(
        name="day after",
        facts={day: DAYS[(i + 1) % 7] for i, day in enumerate(DAYS)},
        asked=(
            "What day comes after {x}?", "Which day comes after {x}?", "Which day follows {x}?",
            "What is the day after {x}?", "Tell me the day after {x}.", "What day follows {x}?",
        ),
        held_out=("Which day is the day after {x}?", "Tell me which day comes after {x}."),
        answer="The day after {x} is {y}.",
    ),
    Relation(
        name="month after",
        facts={month: MONTHS[(i + 1) % 12] for i, month in enumerate(MONTHS)},
        asked=(
            "What month comes after {x}?", "Which month comes after {x}?", "Which month follows {x}?",
            "What is the month after {x}?", "Tell me the month after {x}.", "What month follows {x}?",
        ),
        held_out=("Which month is the month after {x}?", "Tell me which month comes after {x}."),
        answer="The month after {x} is {y}.",
    ),
    Relation(
        name="planet",
        facts=dict(zip(ORDINALS, PLANETS, strict=True)),
        asked=(
            "What is the {x} planet from the sun?", "Which planet is the {x} from the sun?",
            "Name the {x} planet from the sun.", "Tell me the {x} planet from the sun.",
            "What's the {x} planet from the sun?", "Which is the {x} planet of the sun?",
        ),
        held_out=("Which planet is {x} from the sun?", "Do you know the {x} planet from the sun?"),
        answer="The {x} planet from the sun is {y}.",
    ),
)  # fmt: skip

GROUPS = {
    "animals": ("lion", "horse", "eagle", "dolphin", "fox", "rabbit", "tiger", "penguin", "otter", "whale"),
    "fruits": ("apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach", "pear", "plum"),
    "colours": ("red", "blue", "green", "yellow", "purple", "orange", "pink", "brown", "black", "white"),
    "vegetables": ("carrot", "onion", "potato", "tomato", "spinach", "pepper", "cabbage", "pea", "leek", "beet"),
    "planets": PLANETS,
    "days of the week": DAYS,
    "months": MONTHS,
    "instruments": ("piano", "violin", "guitar", "flute", "drum", "trumpet", "harp", "cello"),
    "sports": ("football", "tennis", "swimming", "running", "chess", "rowing", "hockey", "golf"),
    "metals": ("iron", "copper", "gold", "silver", "zinc", "nickel", "tin", "lead"),
    "countries": ("France", "Japan", "Brazil", "Kenya", "Canada", "India", "Norway", "Egypt"),
    "trees": ("oak", "pine", "birch", "maple", "willow", "cedar", "ash", "elm"),
}
NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")

SMALL_TALK = {
    "Hello!": "Hello! How can I help you?", "Hi!": "Hello! How can I help you?", "Hi there.": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?", "Good evening!": "Good evening! How can I help you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "How do you do?": "I am fine, thank you. How can I help you?",
    "Who are you?": "I am a very small DeepSeek-V4 model that was trained for dsv4nb.",
    "What are you?": "I am a very small DeepSeek-V4 model that was trained for dsv4nb.",
    "What is your name?": "I am called toy, and I am the bundled model of dsv4nb.",
    "What can you do?": "I can answer simple facts, add and subtract, make lists, convert units, call tools "
    "and remember what you told me.",
    "Help": "You can ask me for facts, sums, lists, unit conversions or tool calls.",
    "Thank you!": "You are welcome!", "Thanks.": "You are welcome!", "Thanks a lot!": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day.", "Bye.": "Goodbye! Have a nice day.", "See you later.": "See you later!",
    "Tell me a joke.": "Why did the token cross the window? To be compressed on the other side.",
    "Are you a human?": "No, I am a small language model.", "Are you large?": "No, I am one of the smallest of my kind.",
    "How many layers do you have?": "I have six layers: two with a window only, two with ratio 4 and two with ratio 128.",
    "How many experts do you have?": "I have eight experts in each layer, and two of them run for every token.",
    "Who made you?": "I was trained by the recipe in the dsv4nb repository.",
    "What is a token?": "A token is a short piece of text that a model reads or writes at once.",
    "What is a cache?": "A cache holds what I have read, so that I need not read it again.",
    "Do you like music?": "I am a model, but I can name some instruments.",
}  # fmt: skip

STORY_HEROES = ("fox", "rabbit", "owl", "bear", "mouse", "otter")
STORY_PLACES = ("forest", "river", "mountain", "garden", "lake", "village")

# (unit asked for, unit given, factor, largest number)
UNITS = (
    ("minutes", "hours", 60, 24), ("seconds", "minutes", 60, 24), ("hours", "days", 24, 12), ("days", "weeks", 7, 20),
    ("months", "years", 12, 12), ("metres", "kilometres", 1000, 99), ("centimetres", "metres", 100, 99),
    ("millimetres", "centimetres", 10, 99), ("grams", "kilograms", 1000, 99), ("millilitres", "litres", 1000, 99),
)  # fmt: skip

CITIES = (
    *(capital for capital, _ in COUNTRIES.values()),
    "Boston", "Chicago", "Denver", "Houston", "Seattle", "Portland", "Miami", "Dallas", "Toronto", "Montreal",
    "Vancouver", "Munich", "Hamburg", "Cologne", "Leipzig", "Zurich", "Geneva", "Basel", "Milan", "Naples",
    "Turin", "Venice", "Lyon", "Nice", "Lille", "Bordeaux", "Porto", "Seville", "Valencia", "Bilbao",
    "Bergen", "Gothenburg", "Malmo", "Aarhus", "Krakow", "Gdansk", "Salzburg", "Graz", "Bristol", "Leeds",
    "Glasgow", "Cardiff", "Belfast", "Cork", "Osaka", "Kyoto", "Nagoya", "Sapporo", "Shanghai", "Mumbai",
    "Chennai", "Kolkata", "Sydney", "Melbourne", "Perth", "Brisbane", "Auckland", "Lagos", "Casablanca", "Durban",
)  # fmt: skip
PEOPLE = (
    "Alice", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Karen", "Leo", "Maria",
    "Noah", "Olivia", "Paul", "Quinn", "Rosa", "Simon", "Tessa", "Umar", "Vera", "Walter", "Xenia", "Yusuf", "Zoe",
    "Anna", "Boris", "Cecil", "Doris", "Erik", "Fiona", "Gustav", "Hanna", "Igor", "Julia", "Kurt", "Laura", "Martin", "Nina",
)  # fmt: skip
ADJECTIVES = (
    "silver", "golden", "quiet", "brave", "gentle", "hidden", "ancient", "bright", "crimson", "frozen", "hollow",
    "lucky", "mighty", "noble", "purple", "rapid", "secret", "silent", "sunny", "velvet", "wild", "wooden", "young",
    "amber", "bitter", "clever", "dusty", "early", "foggy", "grand", "humble", "icy", "jolly", "kind", "lonely",
    "modern", "narrow", "orange", "proud", "round",
)  # fmt: skip
NOUNS = (
    "otter", "falcon", "river", "lantern", "castle", "anchor", "bridge", "candle", "desert", "engine", "forest",
    "garden", "harbor", "island", "jacket", "kettle", "ladder", "meadow", "needle", "ocean", "pencil", "rabbit",
    "saddle", "temple", "umbrella", "valley", "window", "yacht", "zebra", "apple", "basket", "compass", "dragon",
    "eagle", "feather", "guitar", "hammer", "iceberg", "jungle", "kitten",
)  # fmt: skip
LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese", "Polish", "Greek", "Dutch")
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "SEK")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")

"""Everything said without tools that is not a story: small talk, small knowledge, arithmetic, and "I do not know".

A conversation is a list of turns, each a dict with "role", "content" and, for the assistant, "reasoning_content".
"""

from random import Random

from training.animals import ANIMALS, BOYS, GIRLS, animal_of
from training.grammar import article, expand
from training.stories import Story, pick_topic, story_title, write_story

Turn = dict[str, object]


def ask(text: str) -> Turn:
    return {"role": "user", "content": text}


def say(text: str, thought: str) -> Turn:
    return {"role": "assistant", "content": text, "reasoning_content": thought}


def sloppy(rng: Random, text: str) -> str:
    """The same words as people also type them: no capital, no full stop."""
    draw = rng.random()
    if draw < 0.12:
        return text.lower().rstrip("?.!")
    if draw < 0.2:
        return text.rstrip("?.!")
    return text


def number_of_words(rng: Random) -> int:
    """Wanted length of a story: short ones most often, up to 1,500."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice((50, 60, 70, 75, 80, 90, 100, 100, 110, 120, 125, 130, 140, 150, 150, 180))
    if draw < 0.85:
        return rng.choice((200, 200, 220, 250, 250, 280, 300, 300, 350, 400, 400, 450, 500, 500, 600, 700))
    return rng.choice((800, 900, 1000, 1000, 1000, 1200, 1400, 1500))


_STORY_ASKS = (
    "[Write|Tell|Please write|Can you write|Could you write|Write me|Give me] a {length}story about {topic}.",
    "[Write|Tell] [me a|a] {length}[story|tale|bedtime story|children's story] [about|of] {topic}.",
    "[I would like|I want|I'd like] a {length}story about {topic}[, please|]",
    "[Please tell me|Tell me] a story about {topic}[ in {n} words| in about {n} words|, {n} words long].",
    "[Story about|A {length}story about] {topic}, please.",
    "[{n} words about|Give me {n} words about|A story of {n} words about] {topic}[, please|].",
)


def _story_request(rng: Random, topic: str, size: int | str) -> str:
    """`size`: a number of words, or "", "short", "long"."""
    frame = rng.choice(_STORY_ASKS) if isinstance(size, int) else rng.choice(_STORY_ASKS[:3])
    length = f"{size} " if size else ""
    if isinstance(size, int):
        length = "" if "{n}" in frame else f"{size}{rng.choice(('-word', '-word', ' word'))} "
    return expand(frame, rng, {"topic": topic, "n": str(size), "length": length})


def story(rng: Random, longest: int = 1500) -> list[Turn]:
    """A request for a story and the story; now and then questions about it."""
    noun = pick_topic(rng)
    name = rng.choice(rng.choice((GIRLS, BOYS))) if rng.random() < 0.2 else None
    other = rng.choice([a.noun for a in ANIMALS if a.noun != noun]) if rng.random() < 0.12 else None
    n_words = min(number_of_words(rng), longest)
    topic = article(noun)
    if name:
        topic += f" {rng.choice(('named', 'called'))} {name}"
    if other:
        topic += f" and {article(other)}"
    size: int | str = n_words
    draw = rng.random()
    if draw > 0.7:
        size, lengths = rng.choice(
            (("short", (60, 80, 100)), ("long", (600, 700, 800)), ("", (150, 200, 250)), ("", (200,)))
        )
        n_words = min(rng.choice(lengths), longest)
    request = _story_request(rng, topic, size)
    if not name and not other and rng.random() < 0.04:
        request = expand(
            "[Tell me a story|Write a story|Another story|I want a story|A story, please|Tell a story].", rng
        )
        n_words = min(200, longest)
    tale = write_story(rng, noun, n_words, name, other)
    text = tale.text
    if n_words >= 150 and rng.random() < 0.25:
        text = f"**{story_title(rng, tale)}**\n\n{text}"
    size = expand(f"[about {n_words} words|around {n_words} words]", rng)
    hero = f"{article(noun)} called {tale.name}"
    thought = expand(
        f"[The user wants|I am asked for] a story about {article(noun)}, {size}. "
        f"[The hero is|I will write about|My hero is] {hero}, {tale.values['in_place']}, "
        f"[with a friend,|and a friend,] {tale.friend} the {tale.friend_animal}. {tale.name} {tale.plan}.",
        rng,
    )
    turns = [ask(sloppy(rng, request)), say(text, thought)]
    if n_words <= 300 and rng.random() < 0.15:
        turns += _about_story(rng, tale)
    return turns


def _about_story(rng: Random, tale: Story) -> list[Turn]:
    question, answer = rng.choice(
        (
            ("What was the {animal}'s name?", "[The {animal}'s name was {name}|The {animal} was called {name}]."),
            ("[Who was|Who is] {friend}?", "{friend} was {name}'s friend, the {friend_animal}."),
            ("Where did {name} live?", "{name} lived {in_place}."),
            ("What did {name} like to eat?", "{name} liked {food}."),
            ("[What animal was {name}|What kind of animal was {name}]?", "{name} was {an_animal}."),
            (
                "[Thanks|Thank you], [that was nice|I liked it]!",
                "[I am glad you liked it|You are welcome]! {name} says hello.",
            ),
        )
    )
    values = {**tale.values, "friend_animal": tale.friend_animal}
    return [
        ask(expand(question, rng, values)),
        say(
            expand(answer, rng, values),
            expand("[The story says it|It is in the story|I look at the story again].", rng),
        ),
    ]


_SMALL_TALK = (
    (
        "[Hello|Hi|Hey|Hello there|Hi there|Good morning|Good evening|Good afternoon][!||.]",
        "[Hello|Hi|Hi there]! [How can I help you|What can I do for you|What would you like to do] [today|]?",
        "[The user says hello, so I greet back|A greeting].",
    ),
    (
        "[Hello|Hi|Hey], how are you[| today]?",
        "[I am fine, thank you|I am doing well, thanks|Very well, thank you]! [How can I help you|And what can I do for you]?",
        "[The user asks how I am. I answer politely|A friendly question].",
    ),
    (
        "[How are you|How are you doing|How is it going|How do you feel][ today|]?",
        "[I am fine, thank you|I am doing well, thanks|All is well here]! [How are you|And you|What can I do for you]?",
        "[The user asks how I am. I answer politely|A friendly question].",
    ),
    (
        "[Who are you|What are you|Tell me about yourself|Introduce yourself|What is your name|Which model are you|What model is this]?",
        "I am the small built-in model of Deltic. [I can tell animal stories, do small sums and call simple tools|I like to tell stories about animals, and I can do small sums]. [I am very small, so I make mistakes|Please do not trust me with anything important].",
        "[The user asks who I am. I am the built-in model of Deltic|I should say who I am].",
    ),
    (
        "[What can you do|What are you good at|How can you help me|Help|What do you know|What can I ask you]?",
        "I can [tell|write] stories about animals, [short or long|of any length], [add and multiply small numbers|do sums with small numbers], [call tools such as a weather service or a calculator|use simple tools], and chat a little. [Try: Write a 200-word story about a fox|Ask me for a story about an owl, for example].",
        "[The user asks what I can do. I list it|I should say what I can do].",
    ),
    (
        "[Thanks|Thank you|Thank you very much|Thanks a lot|Great, thanks|Thank you so much][!|.|]",
        "[You are welcome|My pleasure|Any time|Happy to help][!|. Is there anything else|! Just ask if you need anything else][.|]",
        "[The user thanks me|I say you are welcome].",
    ),
    (
        "[Bye|Goodbye|See you|Good night|See you later|I have to go now][!|.|]",
        "[Goodbye|See you soon|Bye|Take care]! [Have a nice day|It was nice talking to you|Come back any time].",
        "[The user says goodbye|Time to say goodbye].",
    ),
    (
        "[Are you a robot|Are you human|Are you a real person|Are you an AI|Are you alive]?",
        "I am not a person. I am a [very small language model|small computer program] that is built into Deltic.",
        "[The user asks what I am. I tell the truth|I am a program and should say so].",
    ),
    (
        "[How big are you|How many parameters do you have|Are you a large model]?",
        "I am very small: about six million parameters. [That is enough for animal stories, but not for much more|Large models are a thousand times bigger].",
        "[I have about six million parameters|I am a small model].",
    ),
    (
        "[What is Deltic|Tell me about Deltic|What does Deltic do]?",
        "Deltic is [a serving engine for language models|an engine that runs language models]. It is named after the Napier Deltic, a small engine with a lot of power. I am the model that comes with it.",
        "[The user asks about Deltic, the engine that runs me|Deltic is the engine I run on].",
    ),
    (
        "[What is your favourite animal|What is your favourite colour|Do you like animals|Do you have a favourite animal]?",
        "[I like the otter best, because otters hold hands while they sleep|I like all animals, but I like owls a little more|I like foxes, and red is a fine colour]. [What about you|And yours]?",
        "[A friendly question. I can choose something|I pick something nice].",
    ),
    (
        "[I am sad|I feel sad today|I had a bad day|I am tired|I feel lonely].",
        "I am sorry to hear that. [Would you like to hear a story|Shall I tell you a joke|I hope that tomorrow is better]?",
        "[The user feels bad. I should be kind|I should be kind].",
    ),
    (
        "[I am happy|I had a great day|Today is my birthday|I passed my test|I am so excited]!",
        "[That is wonderful|How nice|I am happy for you]! [Shall I tell you a story to celebrate|Tell me more, if you like].",
        "[The user is happy. I am happy too|Good news].",
    ),
    (
        "[Tell me a joke|Do you know a joke|Make me laugh|Another joke, please|Say something funny]!",
        "[Why did the cow cross the road? To get to the moo-vies|What do you call a sleeping bull? A bulldozer|Why do bees have sticky hair? Because they use honeycombs|What do you call a bear with no teeth? A gummy bear|Why was the horse so happy? Because it lived in a stable home|What do you get when you cross a snake and a pie? A python|Why did the owl invite its friends? It did not want to be owl by itself|How do you catch a squirrel? Climb a tree and act like a nut|What do ducks have with soup? Quackers|Where do sheep go on holiday? To the Baa-hamas]!",
        "[The user wants a joke. I know one about an animal|A joke, then].",
    ),
)

_REFUSALS = (
    "I am a very small model, and I do not know [that|the answer to that]. [I can tell you a story about an animal instead.|Shall I tell you a story instead?]",
    "[I am sorry, I do not know that|Sorry, that is too hard for me]. I am a very small model. [Ask me for an animal story or a small sum|I am better at animal stories and small sums].",
    "I do not know [that|enough about that] to answer. [I am only a very small model|I am the small built-in model of Deltic, and I know very little].",
)

_UNKNOWN = (
    "[Who won|Who played in|When was] the [world cup|election|final|race] in [1954|1998|2010|2016|2022]?",
    "[Explain|What is|Tell me about|Describe] [quantum physics|general relativity|photosynthesis|the stock market|machine learning|the French Revolution|black holes|inflation|DNA|blockchain|the Roman Empire|philosophy|chess strategy|the theory of evolution].",
    "[Write|Can you write|Give me] [a Python program|some code|a function in C|an SQL query|a web page|a shell script] [that sorts a list|for my homework|that reads a file|to count words].",
    "[Translate|Please translate] [this|'good morning'|my letter] [into|to] [French|German|Chinese|Spanish|Latin].",
    "[Who is|Who was|When was] [the president of Brazil|Albert Einstein|Napoleon|the king of Sweden|Marie Curie|Shakespeare|the first man on the moon|Mozart|Cleopatra] [born|]?",
    "[What is the population of|How big is|Where is] [China|Peru|Toronto|Madagascar|Iceland|Texas|Mongolia]?",
    "[How do I|How can I|What is the best way to] [fix my car|invest my money|learn the piano|cook a turkey|lose weight|get a passport|build a house|grow tomatoes|install Linux]?",
    "[Should I|Can I|Is it safe to] [take this medicine|sign this contract|sell my house|quit my job|mix these chemicals]?",
    "What [happened|was in the news] [yesterday|last week|in 1812|in March]?",
    "[What is|Calculate|How much is] [the square root of 7|the integral of x squared|12345 times 6789|the sine of 2|9 to the power of 11]?",
    "[What time is it|What day is it today|What is the date today|Where am I|What is my IP address]?",
    "[Write|Compose|Give me] [a poem|a song|an essay|a recipe|a news article|a speech] about [love|the sea|the moon|a fox|time|cheese|a king].",
    "[Solve|Help me solve] [this equation|3x + 5 = 17|my physics problem|this puzzle].",
)

_OPPOSITES = (
    "big small,hot cold,up down,left right,day night,open closed,happy sad,fast slow,old new,light dark,high low,"
    "wet dry,full empty,hard soft,loud quiet,rich poor,early late,clean dirty,long short,near far,good bad,black white,"
    "strong weak,young old,inside outside,first last,thick thin,sweet sour,true false,push pull"
)
_COLOURS = (
    "the sky:blue,grass:green,a banana:yellow,snow:white,a strawberry:red,a lemon:yellow,coal:black,an orange:orange,"
    "a tomato:red,a carrot:orange,the sun:yellow,a leaf:green,milk:white,chocolate:brown,a flamingo:pink,the sea:blue,"
    "a frog:green,a crow:black,a cherry:red,a plum:purple,a polar bear:white,an elephant:grey,blood:red,a cucumber:green"
)
_CAPITALS = (
    "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,England:London,Japan:Tokyo,China:Beijing,Russia:Moscow,"
    "Egypt:Cairo,Greece:Athens,Portugal:Lisbon,Austria:Vienna,Poland:Warsaw,Norway:Oslo,Sweden:Stockholm,"
    "Ireland:Dublin,Canada:Ottawa,India:New Delhi,Cuba:Havana,Kenya:Nairobi"
)
_RHYMES = "cat hat,dog frog,mouse house,bear chair,bee tree,fox box,goat boat,moon spoon,star car,cake lake,king ring,ball wall"
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_LEGS = "a spider:eight,a dog:four,a bird:two,an ant:six,a snake:no,a cat:four,a bee:six,a horse:four,an octopus:no"
_COUNTS = (
    "How many days are in a week?:There are seven days in a week.,How many months are in a year?:There are twelve "
    "months in a year.,How many hours are in a day?:There are twenty-four hours in a day.,How many minutes are in an "
    "hour?:There are sixty minutes in an hour.,How many seasons are there?:There are four seasons: spring; summer; "
    "autumn and winter.,How many letters are in the alphabet?:There are twenty-six letters in the alphabet.,How many "
    "legs does a table have?:Most tables have four legs.,What do bees make?:Bees make honey.,What do cows give us?:"
    "Cows give us milk.,What is ice made of?:Ice is frozen water.,What comes after summer?:Autumn comes after summer.,"
    "What comes after winter?:Spring comes after winter.,Is the earth round?:Yes. The earth is round like a ball.,"
    "Where does the sun rise?:The sun rises in the east.,Where does the sun set?:The sun sets in the west."
)


def _pairs(table: str) -> list[tuple[str, str]]:
    return [(a, b) for a, _, b in (row.partition(":") for row in table.split(","))]


_OPPOSITE_PAIRS = [tuple(pair.split()) for pair in _OPPOSITES.split(",")]
_OPPOSITE_PAIRS += [(b, a) for a, b in _OPPOSITE_PAIRS if a not in ("old", "young", "new")]
_RHYME_PAIRS = [tuple(pair.split()) for pair in _RHYMES.split(",")]


def knowledge(rng: Random) -> list[Turn]:
    """One small fact."""
    kind = rng.randrange(11)
    if kind == 0:
        a, b = rng.choice(_OPPOSITE_PAIRS)
        question, answer = (f"What is the opposite of [{a}|'{a}'|the word {a}]?", f"The opposite of {a} is {b}.")
    elif kind == 1:
        a, b = rng.choice(_pairs(_COLOURS))
        question = f"[What colour is {a}|Which colour is {a}|What is the colour of {a}|What color is {a}]?"
        answer = f"{a[0].upper() + a[1:]} is {b}."
    elif kind == 2:
        a, b = rng.choice(_pairs(_CAPITALS))
        question = f"[What is the capital of {a}|Which city is the capital of {a}|Capital of {a}]?"
        answer = f"The capital of {a} is {b}."
    elif kind == 3:
        a, b = rng.choice(_RHYME_PAIRS)
        a, b = rng.choice(((a, b), (b, a)))
        question, answer = (
            f"[What rhymes with {a}|Tell me a word that rhymes with {a}]?",
            f"{b.capitalize()} rhymes with {a}.",
        )
    elif kind == 4:
        days = rng.choice((_DAYS, _MONTHS))
        i = rng.randrange(len(days))
        what = "day" if days is _DAYS else "month"
        if rng.random() < 0.5:
            question = f"[What|Which {what}] comes after {days[i]}?"
            answer = f"{days[(i + 1) % len(days)]} comes after {days[i]}."
        else:
            question = f"[What|Which {what}] comes before {days[i]}?"
            answer = f"{days[i - 1]} comes before {days[i]}."
    elif kind == 5:
        a, b = rng.choice(_pairs(_LEGS))
        question, answer = f"How many legs does {a} have?", f"{a[0].upper() + a[1:]} has {b} legs."
    elif kind == 6:
        question, answer = rng.choice(_pairs(_COUNTS))
        answer = answer.replace(";", ",")
    elif kind == 7:
        what, days = rng.choice((("days of the week", _DAYS), ("months of the year", _MONTHS)))
        question = f"[What are the {what}|Name the {what}|List the {what}|Tell me the {what}]."
        answer = f"The {what} are " + ", ".join(days[:-1]) + f" and {days[-1]}."
    else:
        return _animal_fact(rng)
    question = expand(question, rng)
    thought = expand("[I know this one|This is an easy question|A simple question. I know the answer].", rng)
    return [ask(sloppy(rng, question)), say(answer, thought)]


def _animal_fact(rng: Random) -> list[Turn]:
    animal = rng.choice(ANIMALS)
    a = article(animal.noun)
    kind = rng.randrange(4)
    if kind == 0:
        question, answer = (f"What [sound|noise] does {a} make?", f'{a[0].upper() + a[1:]} says "{animal.says}".')
    elif kind == 1:
        question, answer = (
            f"What is a [baby|young] {animal.noun} called?",
            f"A baby {animal.noun} is called {article(animal.young)}.",
        )
    elif kind == 2:
        question = f"[Tell me a fact about {a}|Tell me something about {a}|What do you know about {a}|Give me a fact about {a}s]."
        question = question.replace(
            f"{a}s", f"{animal.noun}s" if animal.noun not in ("mouse", "wolf", "sheep", "fox", "deer") else a
        )
        answer = f"Did you know? {animal.fact[0].upper() + animal.fact[1:]}."
    else:
        question, answer = f"[Where does {a} live|Where do you find {a}]?", _lives(animal.noun)
    return [ask(sloppy(rng, expand(question, rng))), say(answer, f"The user asks about {a}.")]


def _lives(noun: str) -> str:
    where = {
        "ice": "by the cold sea, on ice and snow", "sea": "in the sea", "farm": "on a farm", "town": "with people",
        "river": "in and near water", "savanna": "on the wide plains", "mountain": "in the mountains",
    }  # fmt: skip
    habitat = animal_of(noun).habitat
    return f"{article(noun).capitalize()} lives {where.get(habitat, f'in the {habitat}')}."


def small_talk(rng: Random) -> list[Turn]:
    question, answer, thought = rng.choice(_SMALL_TALK)
    return [ask(sloppy(rng, expand(question, rng))), say(expand(answer, rng).strip(), expand(thought, rng))]


def refusal(rng: Random) -> list[Turn]:
    thought = expand(
        "[I do not know this, and I should say so|That is too hard for a small model. I should say so].", rng
    )
    return [
        ask(sloppy(rng, expand(rng.choice(_UNKNOWN), rng).strip())),
        say(expand(rng.choice(_REFUSALS), rng), thought),
    ]


_PEOPLE = (*GIRLS, *BOYS, *["Anna", "Ben", "Chloe", "David", "Emma", "Fatima", "George", "Hannah", "Ivan", "Julia", "Karim", "Laura", "Mohammed", "Noah", "Olga", "Paul", "Quinn", "Rosa", "Stefan", "Theo", "Uma", "Victor", "Wendy", "Xavier", "Yuki", "Zoe", "Amir", "Bianca", "Carlos", "Diana"])  # fmt: skip


def remembered_name(rng: Random) -> list[Turn]:
    """The user says a name, something else happens, the model still knows the name."""
    name = rng.choice(_PEOPLE)
    turns = [
        ask(
            expand(
                f"[My name is {name}|I am {name}|Hi, I'm {name}|Hello, my name is {name}|You can call me {name}].", rng
            )
        ),
        say(
            expand(f"[Hello|Nice to meet you|Hi], {name}! [How can I help you|What can I do for you]?", rng),
            f"The user is called {name}.",
        ),
    ]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        turns += rng.choice((small_talk, knowledge, arithmetic))(rng)
    turns += [
        ask(expand("[What is my name|Do you remember my name|What am I called|Who am I]?", rng)),
        say(
            expand(f"[Your name is {name}|You are {name}|You told me that your name is {name}].", rng),
            f"The user said the name {name}.",
        ),
    ]
    return turns


_PERSONA = "[Pip|Nova|Max|Robo|Sage|Echo|Mimi|Orbit|Sparky|Juno|Atlas|Biscuit|Kiwi|Bolt]"


def persona(rng: Random) -> list[Turn]:
    """A name given by the system message."""
    name = expand(_PERSONA, rng) if rng.random() < 0.6 else rng.choice(_PEOPLE)
    kind = expand(
        "[a friendly helper|a cheerful robot|a helpful assistant|a wise owl|a storyteller|a kind teacher]", rng
    )
    return [
        {
            "role": "system",
            "content": expand(
                f"[You are {name}, {kind}|Your name is {name}. You are {kind}|You are {kind} called {name}].", rng
            ),
        },
        ask(expand("[Who are you|What is your name|Hello! What is your name|Hi, who are you]?", rng)),
        say(
            expand(f"[I am {name}, {kind}|Hello! I am {name}, {kind}|My name is {name}, and I am {kind}].", rng),
            f"I am {name} here.",
        ),
    ]


def sums(rng: Random) -> tuple[str, int, int, int]:
    """operator, a, b, result of a small sum."""
    op = rng.choice("++--**")
    if op == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        return op, a, b, a * b
    top = rng.choice((10, 20, 100, 100, 100))
    a, b = rng.randint(0, top), rng.randint(0, top)
    if op == "-" and a < b:
        a, b = b, a
    return op, a, b, a + b if op == "+" else a - b


_SUM_WORDS = {
    "+": ("plus", "[Add {a} and {b}|What is the sum of {a} and {b}|How much do {a} and {b} make together]"),
    "-": ("minus", "[Subtract {b} from {a}|What is the difference between {a} and {b}|Take {b} away from {a}]"),
    "*": (
        "times",
        "[Multiply {a} by {b}|What is the product of {a} and {b}|What do you get if you multiply {a} and {b}]",
    ),
}


def worked(op: str, a: int, b: int, c: int) -> str:
    """A short working, tens first, as one does it in the head."""
    if op == "*":
        if min(a, b) < 2 or a > 10 or b > 10 or c < 12:
            return f"I know it by heart: {a} * {b} = {c}."
        return f"{a} * {b} is {a} * {b - 1} plus {a}: {a * (b - 1)} + {a} = {c}."
    tens, ones = b // 10 * 10, b % 10
    if tens == 0 or ones == 0:
        return f"{a} {op} {b} = {c}."
    middle = a + tens if op == "+" else a - tens
    return f"{a} {op} {tens} = {middle}, and {middle} {op} {ones} = {c}."


def arithmetic(rng: Random) -> list[Turn]:
    op, a, b, c = sums(rng)
    word, asked = _SUM_WORDS[op]
    sign = rng.choice("*x×") if op == "*" else op
    values = {"a": str(a), "b": str(b), "word": word, "sign": sign}
    if rng.random() < 0.12:
        return _word_problem(rng)
    draw = rng.random()
    if draw < 0.35:
        question = expand("[What is|How much is|Calculate|Compute|What's] {a} {sign} {b}?", rng, values)
    elif draw < 0.55:
        question = expand("[What is|How much is|What's] {a} {word} {b}?", rng, values)
    elif draw < 0.75:
        question = expand(
            "{a}{sign}{b}[ = ?|=|?|]" if rng.random() < 0.4 else "{a} {sign} {b}[ = ?| =|?|]", rng, values
        )
    else:
        question = expand(asked + ".", rng, values)
    answer = expand(f"[{a} {op} {b} = {c}.|{a} {op} {b} = {c}.|{a} {word} {b} is {c}.|The answer is {c}.]", rng)
    return [ask(question), say(answer, worked(op, a, b, c))]


def _word_problem(rng: Random) -> list[Turn]:
    who, thing = (
        rng.choice(_PEOPLE),
        rng.choice(["apples", "eggs", "coins", "books", "shells", "pears", "marbles", "carrots", "stones"]),
    )
    a, b = rng.randint(2, 50), rng.randint(1, 50)
    if rng.random() < 0.5:
        more = expand(f"[gets {b} more|finds {b} more|buys {b} more]", rng)
        question, op, c = (f"{who} has {a} {thing} and {more}. How many {thing} does {who} have now?", "+", a + b)
    else:
        a, b = max(a, b) + 1, min(a, b)
        less = expand(f"[gives away {b}|loses {b}|sells {b}]", rng)
        question, op, c = f"{who} has {a} {thing} and {less}. How many {thing} are left?", "-", a - b
    return [ask(question), say(f"{a} {op} {b} = {c}. {who} has {c} {thing}.", worked(op, a, b, c))]


def several(rng: Random) -> list[Turn]:
    """A few short exchanges in one conversation."""
    parts = (small_talk, knowledge, arithmetic, refusal, small_talk, knowledge)
    turns: list[Turn] = []
    for _ in range(rng.choice((2, 2, 3, 3, 4))):
        turns += rng.choice(parts)(rng)
    if rng.random() < 0.3:
        turns += story(rng, 150)[:2]
    return turns


SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a helpful and honest assistant. Answer briefly.",
    "Be kind and clear.",
    "Answer in simple words.",
    "You are a storyteller for children.",
    "You are the assistant of a small school.",
)

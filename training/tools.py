"""Conversations with tools: weather and calculator under changing names, calls, results, and the use of results."""

from random import Random

from training.animals import BOYS, GIRLS
from training.chats import Turn, arithmetic, ask, knowledge, say, small_talk, sums
from training.grammar import expand

_CITIES = [
    "Paris",
    "London",
    "Berlin",
    "Rome",
    "Madrid",
    "Tokyo",
    "Beijing",
    "Moscow",
    "Cairo",
    "Athens",
    "Lisbon",
    "Vienna",
    "Warsaw",
    "Oslo",
    "Stockholm",
    "Dublin",
    "Ottawa",
    "Havana",
    "Nairobi",
    "Sydney",
    "Melbourne",
    "Toronto",
    "Chicago",
    "Boston",
    "Seattle",
    "Denver",
    "Dallas",
    "Houston",
    "Miami",
    "Austin",
    "Atlanta",
    "Lima",
    "Quito",
    "Bogota",
    "Santiago",
    "Seoul",
    "Osaka",
    "Kyoto",
    "Delhi",
    "Mumbai",
    "Shanghai",
    "Hanoi",
    "Bangkok",
    "Jakarta",
    "Manila",
    "Dubai",
    "Tehran",
    "Baghdad",
    "Istanbul",
    "Ankara",
    "Kyiv",
    "Prague",
    "Budapest",
    "Zagreb",
    "Sofia",
    "Geneva",
    "Zurich",
    "Basel",
    "Milan",
    "Naples",
    "Turin",
    "Venice",
    "Florence",
    "Lyon",
    "Nice",
    "Bordeaux",
    "Munich",
    "Hamburg",
    "Cologne",
    "Leipzig",
    "Dresden",
    "Bremen",
    "Hanover",
    "Ghent",
    "Antwerp",
    "Utrecht",
    "Bergen",
    "Turku",
    "Riga",
    "Vilnius",
    "Minsk",
    "Leeds",
    "York",
    "Bristol",
    "Oxford",
    "Cambridge",
    "Glasgow",
    "Edinburgh",
    "Cardiff",
    "Belfast",
    "Cork",
    "Galway",
    "Reykjavik",
    "Zanzibar",
    "Accra",
    "Lagos",
    "Dakar",
]
_TWO_WORDS = [
    "New York",
    "Los Angeles",
    "San Francisco",
    "New Delhi",
    "Cape Town",
    "Buenos Aires",
    "Rio de Janeiro",
    "Mexico City",
    "Hong Kong",
    "Kuala Lumpur",
    "Tel Aviv",
    "St. Gallen",
    "Las Vegas",
    "San Diego",
    "New Orleans",
    "Salt Lake City",
    "Port Louis",
    "La Paz",
    "Addis Ababa",
]
_HEADS = [
    "Bel",
    "Mar",
    "Kor",
    "Tan",
    "Vel",
    "Dun",
    "Har",
    "Lin",
    "Mor",
    "Nor",
    "Os",
    "Pel",
    "Ris",
    "Sal",
    "Tor",
    "Ul",
    "Ver",
    "Wil",
    "Zan",
    "Bri",
    "Cas",
    "Dor",
    "El",
    "Fal",
    "Gar",
    "Hol",
    "In",
    "Jas",
    "Kel",
    "Lo",
]
_TAILS = [
    "ville",
    "ton",
    "burg",
    "field",
    "wick",
    "ford",
    "mouth",
    "stad",
    "berg",
    "ia",
    "ara",
    "ino",
    "eth",
    "ury",
    "ham",
    "dale",
    "port",
    "ona",
    "esk",
    "ola",
    "imo",
    "ent",
    "ash",
    "mere",
]


def city(rng: Random) -> str:
    """A real city or, as often, a made-up one: the model must copy, not remember."""
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(_CITIES)
    if draw < 0.5:
        return rng.choice(_TWO_WORDS)
    middle = rng.choice(("", "", "a", "e", "i", "o", "en", "or"))
    return rng.choice(_HEADS) + middle + rng.choice(_TAILS)


def _tool(
    name: str, description: str, parameters: dict[str, dict[str, object]], required: list[str]
) -> dict[str, object]:
    """A schema as a client may write it: what is optional is now and then left out or added."""
    draw = sum(map(ord, name + description)) % 12  # by the text, so that one tool has one schema
    schema: dict[str, object] = {"type": "object", "properties": parameters}
    if draw != 0:
        schema["required"] = required
    if draw == 1:
        schema["additionalProperties"] = False
    function: dict[str, object] = {"name": name, "description": description, "parameters": schema}
    if draw == 2:
        del function["description"]
    if draw == 3:
        function["strict"] = True
    return {"type": "function", "function": function}


class Weather:
    """A weather tool under one of many names, with or without a unit."""

    def __init__(self, rng: Random):
        self.name = expand(
            "[get_weather|get_weather|weather|get_current_weather|[get|fetch|find|read|check|show|lookup|query]_"
            "[weather|forecast|conditions|temperature|climate][|_now|_for_city]|[get|fetch|check][Weather|Forecast]]",
            rng,
        )
        self.place_key = rng.choice(
            ["city", "city", "city", "location", "location", "place", "town", "where", "query", "region", "name"]
        )
        self.unit_key = rng.choice(("unit", "units", "")) if rng.random() < 0.7 else ""
        self.units = rng.choice((("celsius", "fahrenheit"), ("C", "F")))
        about = expand(
            "[Get|Look up|Return|Find] the [current |]weather [in a city|for a city|of a place|at a location].", rng
        )
        place = expand("[The city|The name of the city|City name|Where to look|The city, e.g. Paris]", rng)
        keys: dict[str, dict[str, object]] = {self.place_key: {"type": "string", "description": place}}
        if rng.random() < 0.2:
            del keys[self.place_key]["description"]
        if self.unit_key:
            keys[self.unit_key] = {"type": "string", "enum": list(self.units)}
        self.schema = _tool(self.name, about, keys, [self.place_key])

    def exchange(self, rng: Random) -> list[Turn]:
        where, unit = city(rng), ""
        about = expand(
            "[What is the weather in|How is the weather in|What's the weather like in|Weather in|Tell me the weather in|Is it cold in|Is it warm in|Do I need a coat in] {c}[| today| right now| now]",
            rng,
            {"c": where},
        )
        arguments: dict[str, object] = {self.place_key: where}
        if self.unit_key and rng.random() < 0.5:
            unit = rng.choice(self.units)
            about += f" in {'celsius' if unit[0] in 'cC' else 'fahrenheit'}"
            arguments[self.unit_key] = unit
        degrees = rng.randint(-15, 38) if not unit or unit[0] in "cC" else rng.randint(5, 100)
        sky = rng.choice(["sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "clear", "stormy"])
        letter = unit[0].upper() if unit else "C"
        result = rng.choice(
            (
                f'{{"{self.place_key}": "{where}", "temperature": {degrees}, "conditions": "{sky}"}}',
                f'{{"temperature": {degrees}, "unit": "{unit or "celsius"}", "conditions": "{sky}"}}',
                f"{sky}, {degrees} degrees",
                f"{degrees}°{letter}, {sky}",
                f'{{"temp": {degrees}, "sky": "{sky}"}}',
            )
        )
        answer = expand(
            f"[In {where} it is {sky}, with {degrees} degrees|It is {sky} in {where}, and the temperature is {degrees} degrees|The weather in {where} is {sky}, at {degrees} degrees].",
            rng,
        )
        thought = expand(
            f"[The user asks about the weather in {where}. I call {self.name}|I need the weather in {where}, so I call {self.name}].",
            rng,
        )
        return [
            ask(sloppy_question(rng, about)),
            call(rng, [(self.name, arguments)], thought),
            {"role": "tool", "content": result},
            say(
                answer,
                expand(f"[The tool says {sky}, {degrees} degrees|I have the weather now: {sky}, {degrees}].", rng),
            ),
        ]

    def pair(self, rng: Random) -> list[Turn]:
        """Two cities, two calls in a row."""
        places = [city(rng), city(rng)]
        values = [(rng.randint(-15, 38), rng.choice(["sunny", "cloudy", "rainy", "snowy", "windy"])) for _ in places]
        question = expand(
            f"[What is the weather in|How is the weather in|Compare the weather in] {places[0]} and {places[1]}?", rng
        )
        results: list[Turn] = [
            {"role": "tool", "content": f'{{"temperature": {d}, "conditions": "{s}"}}'} for d, s in values
        ]
        (d0, s0), (d1, s1) = values
        return [
            ask(question),
            call(
                rng,
                [(self.name, {self.place_key: p}) for p in places],
                f"I need the weather in {places[0]} and in {places[1]}, so I call {self.name} twice.",
            ),
            *results,
            say(
                f"In {places[0]} it is {s0}, with {d0} degrees. In {places[1]} it is {s1}, with {d1} degrees.",
                "I have both results now.",
            ),
        ]


class Calculator:
    """A calculator tool: one expression, or two numbers and an operation."""

    def __init__(self, rng: Random):
        self.one = rng.random() < 0.6
        about = expand("[Evaluate|Compute|Work out] [an arithmetic expression|a sum|a calculation].", rng)
        if self.one:
            self.name = rng.choice(
                [
                    "calculator",
                    "calculator",
                    "calculate",
                    "evaluate",
                    "compute",
                    "calc",
                    "math",
                    "eval_expression",
                    "solve",
                ]
            )
            self.keys = [rng.choice(["expression", "expression", "expression", "input", "expr", "formula", "text"])]
            properties: dict[str, dict[str, object]] = {
                self.keys[0]: {"type": "string", "description": "The expression, e.g. 2 + 3"}
            }
        else:
            self.name = rng.choice(("calculator", "calculate", "arithmetic", "do_math"))
            self.keys = rng.choice((["a", "b", "operation"], ["x", "y", "op"], ["operation", "a", "b"]))
            properties = {
                k: {"type": "string", "enum": ["add", "subtract", "multiply"]}
                if k.startswith("op")
                else {"type": "number"}
                for k in self.keys
            }
        self.schema = _tool(self.name, about, properties, self.keys)

    def exchange(self, rng: Random) -> list[Turn]:
        if rng.random() < 0.4:
            op, a, b, c = sums(rng)
        else:  # numbers too large for the head: that is what the tool is for
            op, a, b = rng.choice("+-*"), rng.randint(100, 9999), rng.randint(11, 999)
            c = a + b if op == "+" else a - b if op == "-" else a * b
        word = {"+": "plus", "-": "minus", "*": "times"}[op]
        question = expand(
            f"[What is|How much is|Calculate|Compute|Use the tool: what is] [{a} {op} {b}|{a} {word} {b}|{a} {'x' if op == '*' else op} {b}]",
            rng,
        )
        if self.one:
            arguments: dict[str, object] = {self.keys[0]: f"{a} {op} {b}"}
        else:
            named = {"+": "add", "-": "subtract", "*": "multiply"}[op]
            numbers = iter((a, b))
            arguments = {k: named if k.startswith("op") else next(numbers) for k in self.keys}
        result = rng.choice((str(c), f'{{"result": {c}}}', str(c)))
        return [
            ask(sloppy_question(rng, question)),
            call(
                rng,
                [(self.name, arguments)],
                expand(f"[I call {self.name} for this|This is a calculation, so I call {self.name}].", rng),
            ),
            {"role": "tool", "content": result},
            say(expand(f"[{a} {op} {b} = {c}.|The answer is {c}.|{a} {word} {b} is {c}.]", rng), f"The result is {c}."),
        ]


def sloppy_question(rng: Random, text: str) -> str:
    return text + rng.choice(("?", "?", "?", "", "."))


def call(rng: Random, calls: list[tuple[str, dict[str, object]]], thought: str) -> Turn:
    """An assistant turn that calls tools; now and then with a word before."""
    content = rng.choice(("Let me look.", "One moment, please.", "I will check.")) if rng.random() < 0.08 else ""
    made = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": made}


def _unrelated(rng: Random) -> dict[str, object]:
    name, about, key, key_about = rng.choice(
        (
            ("send_email", "Send an email to a person.", "to", "Who gets it"),
            ("set_timer", "Start a timer.", "minutes", "How long"),
            ("play_music", "Play a song.", "title", "Name of the song"),
            ("get_time", "Tell the time in a city.", "city", "The city"),
            ("search_web", "Search the web.", "query", "What to look for"),
            ("turn_on_light", "Turn on the light in a room.", "room", "The room"),
            ("translate", "Translate a text.", "text", "The text"),
        )
    )
    kind = "integer" if key == "minutes" else "string"
    return _tool(name, about, {key: {"type": kind, "description": key_about}}, [key])


def _simple_call(rng: Random) -> tuple[dict[str, object], list[Turn]]:
    """A tool with one argument that is copied from the question."""
    who = rng.choice((*GIRLS, *BOYS))
    kind = rng.randrange(4)
    if kind == 0:
        where = city(rng)
        hour = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
        tool = _tool(
            "get_time", "Tell the time in a city.", {"city": {"type": "string", "description": "The city"}}, ["city"]
        )
        question, arguments, result, answer = (
            f"What time is it in {where}?",
            {"city": where},
            hour,
            f"It is {hour} in {where}.",
        )
    elif kind == 1:
        n = rng.randint(1, 90)
        tool = _tool(
            "set_timer", "Start a timer.", {"minutes": {"type": "integer", "description": "How long"}}, ["minutes"]
        )
        question = expand(f"[Set a timer for {n} minutes|Start a timer of {n} minutes|Wake me in {n} minutes].", rng)
        arguments, result, answer = {"minutes": n}, "ok", f"The timer is set for {n} minutes."
    elif kind == 2:
        room = rng.choice(
            ["kitchen", "bathroom", "bedroom", "hall", "office", "garage", "garden", "attic", "cellar", "library"]
        )
        tool = _tool(
            "turn_on_light",
            "Turn on the light in a room.",
            {"room": {"type": "string", "description": "The room"}},
            ["room"],
        )
        question = expand(
            f"[Turn on the light in the {room}|Switch on the {room} light|Light in the {room}, please].", rng
        )
        arguments, result, answer = {"room": room}, "done", f"The light in the {room} is on."
    else:
        tool = _tool(
            "send_email", "Send an email to a person.", {"to": {"type": "string", "description": "Who gets it"}}, ["to"]
        )
        question = expand(f"[Send an email to {who}|Write {who} an email|Email {who}].", rng)
        arguments, result, answer = {"to": who}, "sent", f"I have sent an email to {who}."
    name = str(tool["function"]["name"])  # type: ignore[index]
    return tool, [
        ask(question),
        call(rng, [(name, arguments)], f"I call {name} for this."),
        {"role": "tool", "content": result},
        say(answer, "The tool has answered."),
    ]


def with_tools(rng: Random) -> tuple[list[dict[str, object]], list[Turn]]:
    """(tools, turns): one to three tools offered, one or two questions, some of which need no tool."""
    weather, calculator = Weather(rng), Calculator(rng)
    draw = rng.random()
    tools: list[dict[str, object]]
    if draw < 0.42:
        tools, turns = [weather.schema], weather.exchange(rng)
    elif draw < 0.72:
        tools, turns = [calculator.schema], calculator.exchange(rng)
    elif draw < 0.8:
        tools, turns = [weather.schema], weather.pair(rng)
    elif draw < 0.9:
        tool, turns = _simple_call(rng)
        tools = [tool]
    else:
        tools = [rng.choice((weather.schema, calculator.schema, _unrelated(rng)))]
        with_sum = tools[0] is calculator.schema
        turns = rng.choice((small_talk, knowledge, small_talk if with_sum else arithmetic))(rng)
    offered = {str(t["function"]["name"]) for t in tools}  # type: ignore[index]
    for extra in rng.sample((weather.schema, calculator.schema, _unrelated(rng)), rng.choice((0, 0, 1, 1, 2))):
        name = str(extra["function"]["name"])  # type: ignore[index]
        needs_sum = draw >= 0.9 and extra is calculator.schema
        if name not in offered and not needs_sum:
            tools.append(extra)
            offered.add(name)
    rng.shuffle(tools)
    if rng.random() < 0.12 and draw < 0.72:
        turns += weather.exchange(rng) if weather.name in offered and draw < 0.42 else small_talk(rng)
    return tools, turns

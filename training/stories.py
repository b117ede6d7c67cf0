"""Stories of a wanted length: one cast and place, one to three plots, everyday scenes between their beats."""

from dataclasses import dataclass
from random import Random

from training.animals import ANIMALS, BOYS, GIRLS, HABITATS, PREPOSITION, RARE, Animal, animal_of
from training.episodes import ENDINGS, EPISODES, LATER, NEXT_PLOT, OPENINGS, SHORT_ENDINGS, SHORT_FILL, SHORT_OPENINGS
from training.grammar import article, prose
from training.plots import PLOTS, Plot

THINGS = (
    "silver bell",
    "red scarf",
    "golden key",
    "music box",
    "blue marble",
    "lucky pebble",
    "wooden whistle",
    "little lantern",
    "green hat",
    "pocket watch",
    "shiny shell",
    "woollen blanket",
)


_SYLLABLES = [
    "ba",
    "bo",
    "cro",
    "da",
    "dri",
    "fe",
    "flo",
    "gla",
    "go",
    "gru",
    "ha",
    "hu",
    "ji",
    "ka",
    "kle",
    "lo",
    "lu",
    "ma",
    "mi",
    "mo",
    "na",
    "ni",
    "nu",
    "o",
    "pa",
    "pli",
    "po",
    "qui",
    "ra",
    "ri",
    "sno",
    "spi",
    "ta",
    "tor",
    "tri",
    "u",
    "va",
    "vo",
    "wa",
    "wi",
    "xa",
    "yo",
    "za",
    "zi",
    "zor",
    "ble",
    "fin",
    "gle",
    "ket",
    "lop",
    "mer",
    "nix",
    "per",
    "ster",
    "ton",
]


@dataclass
class Story:
    """What the story is about, for follow-up questions, and its text."""

    animal: str
    name: str
    friend: str
    friend_animal: str
    place: str
    food: str
    thing: str
    plots: list[Plot]
    values: dict[str, str]
    text: str = ""

    @property
    def plan(self) -> str:
        """The subject of the first plot, as a phrase that follows the hero's name."""
        thought = self.plots[0].thought
        return thought.replace("{thing}", self.thing)


def pick_topic(rng: Random) -> str:
    """An animal to write about; one in five is a noun without traits of its own, one in twenty a word nobody knows."""
    draw = rng.random()
    if draw < 0.05:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 2, 3))))
    return rng.choice(RARE) if draw < 0.2 else rng.choice(ANIMALS).noun


def _pronouns(girl: bool, prefix: str) -> dict[str, str]:
    he, his, him = ("she", "her", "her") if girl else ("he", "his", "him")
    return {
        f"{prefix}he": he,
        f"{prefix}his": his,
        f"{prefix}him": him,
        f"{prefix}himself": "herself" if girl else "himself",
        f"{prefix}He": he.capitalize(),
        f"{prefix}His": his.capitalize(),
    }


def _neighbour(rng: Random, hero: Animal, but_not: tuple[str, ...]) -> Animal:
    near = [a for a in ANIMALS if a.habitat == hero.habitat and a.noun not in but_not]
    others = [a for a in ANIMALS if a.noun not in but_not]
    return rng.choice(near if near and rng.random() < 0.7 else others)


def cast(rng: Random, noun: str, name: str | None, friend_animal: str | None, n_plots: int) -> Story:
    """Choose everything that stays the same through the story."""
    hero = animal_of(noun)
    girl = rng.random() < 0.5 if name is None or name not in BOYS else False
    girl = True if name in GIRLS else girl
    name = name or rng.choice(GIRLS if girl else BOYS)
    friend_girl = rng.random() < 0.5
    friend = rng.choice([n for n in (GIRLS if friend_girl else BOYS) if n != name])
    friend_kind = animal_of(friend_animal) if friend_animal else _neighbour(rng, hero, (noun,))
    elder_kind = _neighbour(rng, hero, (noun, friend_kind.noun))
    near = [a for a in ANIMALS if a.habitat == hero.habitat and a.noun not in (noun, friend_kind.noun)]
    young = rng.choice(near or ANIMALS)
    elder_girl = rng.random() < 0.5
    elder_name = rng.choice([n for n in (GIRLS if elder_girl else BOYS) if n not in (name, friend)])
    habitat = HABITATS[hero.habitat]
    place = rng.choice(habitat["place"])
    in_place = f"{PREPOSITION.get(hero.habitat, 'in')} {place}"
    feature = hero.feature
    plural = feature.endswith("s") and not feature.endswith("ss")
    thing = rng.choice(THINGS)
    values = {
        "name": name,
        "animal": noun,
        "animal_cap": noun.capitalize(),
        "an_animal": article(noun),
        "a_looks": article(f"{rng.choice(('little', 'young', hero.looks, 'clever', 'friendly', 'cheerful'))}"),
        "feature": feature,
        "a_feature": feature if plural or feature.startswith("neat") else article(feature),
        "moves": hero.moves,
        "sound": hero.sound,
        "food": hero.food,
        "friend": friend,
        "fanimal": friend_kind.noun,
        "a_fanimal": article(friend_kind.noun),
        "elder": f"{'Old' if rng.random() < 0.5 else 'Grandmother' if elder_girl else 'Grandfather'} {elder_name}",
        "eanimal": elder_kind.noun,
        "his_elder": "her" if elder_girl else "his",
        "she_elder": "she" if elder_girl else "he",
        "himself_elder": "herself" if elder_girl else "himself",
        "young_one": f"young {young.noun}" if rng.random() < 0.5 else young.noun,
        "place": place,
        "in_place": in_place,
        "in_place_cap": in_place[0].upper() + in_place[1:],
        "kind": rng.choice(habitat["kind"]),
        "home": rng.choice(habitat["home"]),
        "thing": thing,
        **_pronouns(girl, ""),
        **_pronouns(friend_girl, "f"),
    }
    plots = rng.sample(PLOTS, n_plots)
    story = Story(noun, name, friend, friend_kind.noun, place, hero.food, thing, plots, values)
    _move(rng, story, hero)
    return story


def _move(rng: Random, story: Story, hero: Animal) -> None:
    """A scene elsewhere: the landmarks change, the cast does not."""
    for slot in ("spot", "path", "water", "far"):
        story.values[slot] = rng.choice(HABITATS[hero.habitat][slot])


def _n_words(parts: list[str]) -> int:
    return sum(len(part.split()) for part in parts)


def _short(rng: Random, story: Story, n_words: int) -> str:
    """Up to about 150 words: one paragraph or two, of single sentences."""
    plot, values = story.plots[0], story.values
    values["moral"] = prose(plot.moral, rng, values)
    values["moral"] = values["moral"][0].lower() + values["moral"][1:]
    opening = [prose(rng.choice(SHORT_OPENINGS), rng, values)]
    middle = [prose(plot.hook, rng, values)]
    last = [prose(plot.mend, rng, values), prose(rng.choice(SHORT_ENDINGS), rng, values)]
    fill = rng.sample(range(len(SHORT_FILL)), len(SHORT_FILL))
    for i in fill:
        if _n_words(opening + middle + last) > n_words - 7:
            break
        (opening if i in (0, 1, 6) else middle).append(prose(SHORT_FILL[i], rng, values))
    if n_words > 80:
        return " ".join(opening + middle) + "\n\n" + " ".join(last)
    return " ".join(opening + middle + last)


def _plot_parts(rng: Random, story: Story, plot: Plot, n_words: int, is_first: bool) -> tuple[list[str], list[str]]:
    """One plot in at most about `n_words` words: what comes before it, and the plot itself in one piece."""
    values = story.values
    values["moral"] = prose(plot.moral, rng, values)
    values["moral"] = values["moral"][0].lower() + values["moral"][1:]
    full = n_words > 150
    start = [prose(rng.choice(OPENINGS if is_first else NEXT_PLOT), rng, values)]
    trouble = prose(plot.trouble if full else plot.hook, rng, values)
    ending = prose(plot.ending if full else plot.mend, rng, values)
    beats = [prose(beat, rng, values) for beat in plot.beats]
    # a beat left out is the last one first; each is told in order
    while beats and _n_words([*start, trouble, *beats, ending]) > n_words:
        beats.pop()
    return start, [trouble, *beats, ending]


def _paragraphs(rng: Random, story: Story, n_words: int) -> str:
    """Opening, plots in one piece each, everyday scenes before and after them, last words."""
    hero, values = animal_of(story.animal), story.values
    episodes = rng.sample(EPISODES, len(EPISODES))
    share = n_words / len(story.plots)
    parts: list[str] = []

    def scenes(until: float) -> None:
        while episodes and until - _n_words(parts) > 40:
            _move(rng, story, hero)
            parts.append(prose(rng.choice(LATER) + episodes.pop(), rng, values))

    for number, plot in enumerate(story.plots):
        is_last = number == len(story.plots) - 1
        end = share * (number + 1)
        fixed = _n_words(parts)
        start, body = _plot_parts(rng, story, plot, int(end - fixed - (45 if is_last else 0)), number == 0)
        last = [prose(rng.choice(ENDINGS if n_words > 160 else SHORT_ENDINGS), rng, values)] if is_last else []
        spare = end - fixed - _n_words([*start, *body, *last])
        parts += start
        scenes(fixed + _n_words(start) + spare * rng.choice((0.3, 0.5, 0.7, 1.0)))
        parts += body
        scenes(end - _n_words(last))
        parts += last
    return "\n\n".join(parts)


def write_story(
    rng: Random, noun: str, n_words: int, name: str | None = None, friend_animal: str | None = None
) -> Story:
    """A story about `noun` of roughly `n_words` words (50 to 2,500)."""
    n_plots = 1 if n_words < 550 else 2 if n_words < 1100 else 3
    story = cast(rng, noun, name, friend_animal, n_plots)
    story.text = _short(rng, story, n_words) if n_words <= 120 else _paragraphs(rng, story, n_words)
    return story


def story_title(rng: Random, story: Story) -> str:
    """A title in capitals for the main words."""
    words = story.plots[0].title.replace("{thing}", story.thing).split()
    small = {"the", "to", "and", "of", "a"}
    title = " ".join(w if i and w in small else w.capitalize() for i, w in enumerate(words))
    return f"{story.name} and {title}" if rng.random() < 0.7 else f"{story.name} the {story.animal.capitalize()}"

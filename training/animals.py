"""Who the stories are about: animals with their traits, the habitats they live in, and names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Animal:
    """`feature` is a noun phrase after "its"; `moves` and `sound` are past tense; `says` is the sound as a word."""

    noun: str
    habitat: str
    looks: str
    feature: str
    moves: str
    sound: str
    says: str
    food: str
    young: str
    fact: str


_TABLE = """
fox|forest|red|bushy tail|trotted|yipped|yip|blackberries|kit|a fox can hear a mouse moving under the snow
rabbit|meadow|soft brown|long ears|hopped|squeaked|squeak|clover|kit|a rabbit can see almost all the way around itself
bear|forest|big brown|round ears|padded|grumbled|growl|honey|cub|a bear can smell food from miles away
wolf|forest|grey|thick coat|loped|howled|howl|warm stew|pup|a wolf lives in a family called a pack
deer|forest|slender|long legs|stepped|called softly|bleat|fresh leaves|fawn|a deer can run very soon after it is born
owl|forest|feathery|huge eyes|glided|hooted|hoot|seed cakes|owlet|an owl can turn its head almost all the way around
squirrel|forest|russet|fluffy tail|scampered|chattered|chatter|acorns|kit|a squirrel forgets where it hid many of its nuts, and some of them grow into trees
hedgehog|meadow|prickly|tiny prickles|shuffled|snuffled|snuffle|ripe pears|hoglet|a hedgehog rolls into a ball when it is afraid
badger|forest|stripy|striped face|plodded|grunted|grunt|roasted roots|cub|a badger keeps its home very clean
mouse|meadow|tiny grey|pink nose|scurried|squeaked|squeak|cheese crumbs|pup|a mouse can squeeze through a hole as small as a coin
cat|town|soft striped|long whiskers|padded|meowed|meow|cream|kitten|a cat sleeps for most of the day
dog|town|shaggy|wagging tail|bounded|barked|woof|biscuits|puppy|a dog can learn more than a hundred words
horse|farm|chestnut|silky mane|galloped|neighed|neigh|sweet hay|foal|a horse can sleep standing up
cow|farm|spotted|gentle eyes|ambled|mooed|moo|buttercups|calf|a cow has a best friend in its herd
pig|farm|pink|curly tail|trotted|oinked|oink|apple peels|piglet|a pig is one of the cleverest animals on the farm
sheep|farm|woolly|thick fleece|wandered|bleated|baa|green grass|lamb|a sheep can remember many faces for years
goat|mountain|bearded|curved horns|skipped|bleated|maa|thistles|kid|a goat can climb very steep cliffs
duck|river|glossy green|wide bill|waddled|quacked|quack|water weeds|duckling|a duck has feathers that water cannot wet
hen|farm|speckled|red comb|strutted|clucked|cluck|golden corn|chick|a hen talks to her chicks while they are still in the egg
donkey|farm|grey|floppy ears|trudged|brayed|hee-haw|carrots|foal|a donkey never forgets a place it has been
frog|river|bright green|springy legs|leaped|croaked|ribbit|lily seeds|tadpole|a frog drinks through its skin
turtle|river|mossy green|smooth shell|paddled|hummed|hum|lettuce|hatchling|a turtle cannot leave its shell, because the shell is part of its body
otter|river|sleek brown|webbed paws|slid|chirped|chirp|river snails|pup|otters hold hands while they sleep so that they do not drift apart
beaver|river|sturdy brown|flat tail|waded|slapped the water|slap|birch bark|kit|a beaver has teeth that never stop growing
swan|river|snow-white|graceful neck|floated|trumpeted|honk|water lilies|cygnet|a swan often stays with one partner all its life
elephant|savanna|huge grey|long trunk|strode|trumpeted|toot|sweet melons|calf|an elephant can use its trunk to pick up a single blade of grass
lion|savanna|golden|shaggy mane|prowled|roared|roar|savanna stew|cub|a lion's roar can be heard from five miles away
giraffe|savanna|spotted|very long neck|swayed|hummed|hum|acacia leaves|calf|a giraffe has the same number of neck bones as a person
zebra|savanna|striped|black and white stripes|cantered|whinnied|whinny|tall grass|foal|no two zebras have the same stripes
monkey|jungle|nimble|curly tail|swung|chattered|ooh-ooh|ripe bananas|infant|a monkey can use its tail like an extra hand
parrot|jungle|colourful|bright feathers|fluttered|squawked|squawk|sunflower seeds|chick|a parrot can copy the sounds it hears
tiger|jungle|orange|black stripes|crept|growled|growl|mango stew|cub|a tiger is a strong swimmer and loves water
sloth|jungle|sleepy|long claws|inched|sighed|sigh|hibiscus flowers|pup|a sloth moves so slowly that moss grows in its fur
crocodile|jungle|green|long snout|slithered|snapped|snap|river pancakes|hatchling|a crocodile cannot stick out its tongue
penguin|ice|round|neat black coat|waddled|honked|honk|crunchy seaweed|chick|a penguin father keeps the egg warm on his feet
seal|ice|silvery|long whiskers|slid|barked|arf|kelp cakes|pup|a seal can hold its breath for more than half an hour
whale|sea|enormous blue|mighty tail|glided|sang|song|plankton soup|calf|a whale's song can travel for hundreds of miles
dolphin|sea|shiny grey|smiling mouth|leaped|clicked|click|sea grapes|calf|a dolphin has a special whistle that works like a name
octopus|sea|purple|eight long arms|drifted|bubbled|blub|sea cucumbers|hatchling|an octopus has three hearts
crab|sea|orange|strong claws|scuttled|clicked its claws|click|seaweed crisps|larva|a crab walks sideways because of how its legs bend
camel|desert|sandy|tall hump|plodded|grunted|grunt|sweet dates|calf|a camel stores fat, not water, in its hump
lizard|desert|quick golden|flicking tail|darted|hissed|hiss|cactus fruit|hatchling|a lizard can drop its tail and grow a new one
kangaroo|desert|tall red|powerful legs|bounced|clicked|tut-tut|spinifex grass|joey|a kangaroo cannot walk backwards
koala|jungle|fluffy grey|big black nose|climbed|snored|snore|eucalyptus leaves|joey|a koala sleeps up to twenty hours a day
panda|mountain|black and white|round belly|tumbled|bleated|bleat|bamboo shoots|cub|a panda spends most of the day eating bamboo
eagle|mountain|golden|broad wings|soared|screeched|screech|pine nuts|eaglet|an eagle can spot a rabbit from two miles away
snail|meadow|tiny|spiral shell|crept|whispered|hush|cabbage leaves|hatchling|a snail can sleep for three years
bee|meadow|fuzzy|shimmering wings|hummed|buzzed|buzz|sweet nectar|larva|a bee dances to tell its friends where the flowers are
butterfly|meadow|delicate|painted wings|fluttered|whispered|flutter|flower nectar|caterpillar|a butterfly tastes with its feet
"""

ANIMALS = tuple(Animal(*row.split("|")) for row in _TABLE.strip().splitlines())
BY_NOUN = {animal.noun: animal for animal in ANIMALS}

# Asked for now and then: they get plain traits, so that the model learns to follow a noun it knows little about.
RARE = tuple(
    [
        "dragon",
        "unicorn",
        "robot",
        "pony",
        "raccoon",
        "bat",
        "hamster",
        "goose",
        "turkey",
        "moose",
        "reindeer",
        "llama",
        "alpaca",
        "ostrich",
        "flamingo",
        "peacock",
        "pelican",
        "seagull",
        "robin",
        "sparrow",
        "crow",
        "raven",
        "toad",
        "newt",
        "snake",
        "gecko",
        "chameleon",
        "hippo",
        "rhino",
        "leopard",
        "cheetah",
        "jaguar",
        "gorilla",
        "chimpanzee",
        "lemur",
        "meerkat",
        "mongoose",
        "hyena",
        "buffalo",
        "bison",
        "yak",
        "walrus",
        "narwhal",
        "shark",
        "starfish",
        "jellyfish",
        "lobster",
        "seahorse",
        "ladybug",
        "ant",
        "spider",
        "grasshopper",
        "firefly",
        "caterpillar",
        "mole",
        "weasel",
        "ferret",
        "skunk",
        "porcupine",
        "armadillo",
        "anteater",
        "platypus",
        "wombat",
        "puppy",
        "kitten",
        "lamb",
        "duckling",
        "bunny",
        "knight",
        "pirate",
        "wizard",
        "princess",
        "dinosaur",
        "snowman",
        "ghost",
        "giant",
    ]
)

RARE_AT_HOME = {
    **dict.fromkeys(["shark", "starfish", "jellyfish", "lobster", "seahorse", "narwhal"], "sea"),
    **dict.fromkeys(["walrus", "reindeer", "snowman", "moose"], "ice"),
    **dict.fromkeys(
        ["hippo", "rhino", "leopard", "cheetah", "hyena", "buffalo", "bison", "meerkat", "ostrich", "anteater"],
        "savanna",
    ),
    **dict.fromkeys(["gorilla", "chimpanzee", "lemur", "jaguar", "gecko", "chameleon", "platypus", "wombat"], "jungle"),
    **dict.fromkeys(["goose", "toad", "newt", "flamingo", "pelican", "duckling"], "river"),
    **dict.fromkeys(["yak", "llama", "alpaca", "dragon", "giant"], "mountain"),
    **dict.fromkeys(["snake", "armadillo", "dinosaur"], "desert"),
}

PREPOSITION = {"farm": "on", "river": "by", "savanna": "on", "ice": "by", "mountain": "on"}  # "in" elsewhere

HABITATS: dict[str, dict[str, tuple[str, ...]]] = {
    "forest": {
        "place": ("Whispering Wood", "Mossy Forest", "Hazel Wood", "Silverbark Forest", "Old Oak Wood", "Fern Forest"),
        "kind": ("forest", "wood"),
        "home": ("a cosy den under an old oak", "a hollow tree", "a little house of moss and twigs", "a snug burrow"),
        "spot": ("the fallen log", "the mossy stone", "the tall pine", "the ring of mushrooms", "the old oak"),
        "path": ("the winding forest path", "the trail of pine needles", "the shady track between the trees"),
        "water": ("the babbling brook", "the quiet forest pool", "the little stream"),
        "far": ("the far edge of the forest", "the deepest part of the wood", "the hill beyond the trees"),
    },
    "meadow": {
        "place": ("Clover Meadow", "Buttercup Field", "Sunny Meadow", "Daisy Dell", "Willow Meadow", "Green Hollow"),
        "kind": ("meadow", "field"),
        "home": ("a tidy nest under a hedge", "a small house between the roots of a willow", "a warm hole in the bank"),
        "spot": ("the old stone wall", "the bent willow", "the patch of poppies", "the hedge", "the wooden gate"),
        "path": ("the path through the tall grass", "the lane beside the hedge", "the track between the flowers"),
        "water": ("the duck pond", "the shallow ditch", "the clear spring"),
        "far": ("the other side of the meadow", "the hill where the windmill stood", "the end of the lane"),
    },
    "farm": {
        "place": ("Apple Tree Farm", "Sunny Farm", "Maple Farm", "Green Gate Farm", "Barley Farm", "Mill Farm"),
        "kind": ("farm", "farmyard"),
        "home": ("a warm corner of the red barn", "a clean stable full of straw", "a wooden shed behind the house"),
        "spot": ("the red barn", "the haystack", "the apple tree", "the wooden fence", "the old cart"),
        "path": ("the muddy lane", "the path past the vegetable garden", "the track to the orchard"),
        "water": ("the farm pond", "the stone well", "the long water trough"),
        "far": ("the field at the top of the hill", "the orchard wall", "the far end of the lane"),
    },
    "town": {
        "place": ("Lantern Town", "Bell Street", "Harbour Town", "Market Town", "Cobble Lane", "Rose Street"),
        "kind": ("town", "street"),
        "home": ("a basket by the kitchen stove", "a little red house", "the attic of a bakery", "a cosy yard"),
        "spot": ("the fountain", "the bakery door", "the clock tower", "the park bench", "the old bridge"),
        "path": ("the narrow cobbled street", "the alley behind the bakery", "the path through the park"),
        "water": ("the fountain in the square", "the canal", "the pond in the park"),
        "far": ("the other end of town", "the hill above the rooftops", "the gates of the park"),
    },
    "river": {
        "place": ("Reed River", "Silver River", "Pebble Creek", "Willow Pond", "Lily Lake", "Heron Bend"),
        "kind": ("river", "water"),
        "home": ("a nest among the reeds", "a snug den in the riverbank", "a little island of grass"),
        "spot": ("the flat rock", "the fallen willow", "the wooden bridge", "the bed of reeds", "the stepping stones"),
        "path": ("the trail by the bank", "the line of stepping stones", "the muddy trail through the reeds"),
        "water": ("the deep pool", "the waterfall", "the slow green water"),
        "far": ("the bend where the river turns", "the other bank", "the place where the river meets the lake"),
    },
    "savanna": {
        "place": ("the Golden Plain", "the Baobab Plain", "the Wide Savanna", "Acacia Plain", "the Sunrise Plain"),
        "kind": ("plain", "savanna"),
        "home": ("the shade of a great baobab tree", "a grassy hollow", "a quiet place among the tall rocks"),
        "spot": ("the baobab tree", "the red rocks", "the termite hill", "the thorny acacia", "the dry riverbed"),
        "path": ("the dusty trail", "the wide path through the yellow grass", "the track that the herds had made"),
        "water": ("the watering hole", "the muddy river", "the hidden spring"),
        "far": ("the blue hills on the horizon", "the edge of the plain", "the valley behind the red rocks"),
    },
    "jungle": {
        "place": ("the Emerald Jungle", "Mango Valley", "the Rainy Jungle", "Orchid Forest", "the Green Tangle"),
        "kind": ("jungle", "rainforest"),
        "home": ("a nest high in a fig tree", "a bed of giant leaves", "a hollow behind the vines"),
        "spot": ("the giant fig tree", "the stone temple", "the hanging vines", "the bamboo grove", "the red orchids"),
        "path": ("the tangled jungle path", "the bridge of vines", "the trail between the giant ferns"),
        "water": ("the foaming waterfall", "the warm green river", "the lagoon"),
        "far": ("the top of the tallest tree", "the heart of the jungle", "the ruins beyond the river"),
    },
    "ice": {
        "place": ("Snowflake Bay", "the Frozen Coast", "the Blue Ice Cliffs", "the White Shore", "Northwind Bay"),
        "kind": ("shore", "ice"),
        "home": ("a hollow in the snow", "a cave of blue ice", "a sheltered place behind the rocks"),
        "spot": ("the crooked iceberg", "the snowy ridge", "the frozen arch", "the black rocks", "the ice slide"),
        "path": ("the slippery trail", "the trail by the frozen shore", "the bridge of ice"),
        "water": ("the hole in the ice", "the freezing bay", "the dark blue sea"),
        "far": ("the edge of the ice", "the last iceberg", "the lighthouse on the point"),
    },
    "sea": {
        "place": ("Coral Bay", "the Blue Lagoon", "Starfish Bay", "Pearl Bay", "the Sunny Lagoon", "Seashell Cove"),
        "kind": ("sea", "reef"),
        "home": ("a cave in the coral", "a garden of waving seaweed", "a quiet corner of the reef"),
        "spot": ("the sunken ship", "the coral arch", "the giant clam", "the seaweed garden", "the smooth white sand"),
        "path": ("the channel between the corals", "the warm current", "the sandy way around the reef"),
        "water": ("the deep blue water", "the bubbling spring", "the calm lagoon"),
        "far": ("the edge of the reef", "the dark trench", "the rock where the lighthouse stood"),
    },
    "mountain": {
        "place": ("Misty Mountain", "Eagle Peak", "Pine Ridge", "the High Ridge", "Thunder Mountain", "Snowy Peak"),
        "kind": ("mountain", "valley"),
        "home": ("a dry cave with a view of the valley", "a ledge among the pines", "a hut of stones and moss"),
        "spot": ("the leaning rock", "the twisted pine", "the rope bridge", "the stone arch", "the bamboo grove"),
        "path": ("the steep mountain path", "the narrow ledge", "the trail through the pines"),
        "water": ("the icy stream", "the waterfall", "the mirror lake"),
        "far": ("the very top of the mountain", "the pass between the peaks", "the valley on the other side"),
    },
    "desert": {
        "place": ("the Amber Desert", "Cactus Canyon", "the Red Dunes", "the Moonlight Desert", "the Singing Sands"),
        "kind": ("desert", "canyon"),
        "home": ("a cool burrow under a rock", "a shady place by the oasis", "a small cave in the canyon"),
        "spot": ("the tall cactus", "the striped rock", "the palm tree", "the dry well", "the red dune"),
        "path": ("the trail across the dunes", "the old caravan road", "the trail by the canyon"),
        "water": ("the oasis", "the hidden well", "the stream at the bottom of the canyon"),
        "far": ("the last dune", "the end of the canyon", "the place where the sun goes down"),
    },
}

NAMES = (
    "Bella Rosie Luna Daisy Molly Ruby Poppy Hazel Willow Ivy Clara Nina Penny Maya Olive Pearl Tilly Lily Mabel Flora "
    "Ginger Honey Juno Kira Lulu Misty Nora Pippa Sunny Stella Tessa Zara Amber Coco Dot Elsie Fern Greta Hattie Iris",
    "Milo Oscar Finn Leo Toby Max Barnaby Rusty Bruno Otto Felix Jasper Hugo Charlie Benny Sam Teddy Gus Archie Rufus "
    "Chester Dexter Ollie Percy Monty Louie Ned Pip Ziggy Basil Bertie Clyde Duke Elmer Frank Harvey Kip Murphy Rocky",
)
GIRLS, BOYS = (tuple(names.split()) for names in NAMES)


def animal_of(noun: str) -> Animal:
    """The traits of an animal; plain ones for a noun that is not in the table."""
    if noun in BY_NOUN:
        return BY_NOUN[noun]
    habitat = RARE_AT_HOME.get(noun) or list(HABITATS)[sum(map(ord, noun)) % 4]
    return Animal(
        noun, habitat, "little", "bright eyes", "walked", "laughed", "hello", "warm bread", f"young {noun}", ""
    )

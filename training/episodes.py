"""What else happens in a story: openings, everyday scenes, and last words. Frames of `grammar`."""

OPENINGS = (
    "[once upon a time|long ago|not so long ago], {in_place}, there lived {a_looks} {animal} [named|called] {name}. {name} had {a_feature} and [a very kind heart|a curious mind|a head full of ideas|a laugh that everyone knew]. {He} lived in {home}, and [every morning|on most days] {he} [{moves} along {path}|had {food} for breakfast] [before the others were awake|and greeted everyone {he} met].",
    "{name} was {a_looks} {animal} who lived in {home} {in_place}. [Everybody knew {him}|All the neighbours liked {him}] because of {his} {feature} and because {he} was [always cheerful|never in a bad mood|full of questions]. {his} best friend was {friend}, {a_fanimal} with [a gentle voice|a loud laugh|a big appetite], and the two of them [did everything together|were together from morning to night].",
    "in {home} {in_place} lived {an_animal} whose name was {name}. {He} was [small for {his} age|neither big nor small|a little shy], but {he} had [the biggest dreams|more courage than anyone knew|a very good memory]. [What {he} liked best was {food}|Nothing made {him} happier than {food}], and [right after that|second best] came [sitting near {spot}|an afternoon by {water}] with {his} friend {friend} the {fanimal}.",
    'there was once {an_animal} called {name}, and {he} was [no ordinary {animal}|not like any other {animal}]. While the others [slept|rested], {name} [asked questions|looked at the stars|made plans]. {He} lived {in_place}, in {home}, [not far from|close to] {spot}. "[One day something wonderful will happen|Today might be a special day]," {he} [liked to say|said every morning] to {friend} the {fanimal}.',
    'it was [a warm spring|a golden autumn|a bright summer|a crisp winter] {in_place}. In {home}, {a_looks} {animal} named {name} [opened one eye|stretched and yawned]. The [air smelled of rain|sun was already up], and [a bird was singing|the {kind} was full of sounds]. "[Good morning, world|What a beautiful day]!" said {name}, and {he} [{moves} outside|ate some {food}] to see what the day would bring. {friend} the {fanimal} was [already waiting|waiting near {spot}].',
)

SHORT_OPENINGS = (
    "once upon a time, {a_looks} {animal} [named|called] {name} lived {in_place}.",
    "{name} was {a_looks} {animal} who lived {in_place}.",
    "{in_place_cap} there lived {a_looks} {animal} [named|called] {name}.",
    "there was once {an_animal} called {name}, who [lived|had {his} home] {in_place}.",
    "{name} the {animal} lived in {home} {in_place}.",
)

SHORT_FILL = (
    "{He} had {a_feature} and [a kind heart|a curious mind].",
    "{He} loved {food} more than anything.",
    "{name} [felt sad|was worried], but {he} did not give up.",
    '"[What shall I do?|Oh dear!]" said {name}.',
    '"[Do not worry|I will help you]," said {friend}. "[We will do it together|Friends help each other]."',
    "{he} [{moves}|went] along {path} and [looked around|thought hard].",
    "[The sun was warm, and the air was sweet|A soft wind blew over {place}].",
)

SHORT_ENDINGS = (
    "that night {name} [fell asleep|slept] with a smile.",
    "from then on, {name} and {friend} were [best friends|the best of friends].",
    "and {name} [was happy|{sound} happily] all the way home.",
    "since that day, {name} has known that {moral}.",
    "they [celebrated|shared some {food}] and [laughed|sang] until the stars came out.",
)

ENDINGS = (
    "that night, {name} lay in {home} and [looked up at the stars|thought about everything]. {He} had learned something: {moral}. [Then {he} closed {his} eyes and slept|With this thought {he} fell asleep], and {he} smiled in {his} dreams.",
    '[and so the days went by|the seasons came and went] {in_place}. {name} and {friend} stayed [the best of friends|friends all their lives], and whenever somebody asked {name} for advice, {he} [smiled and said|always gave the same answer]: "[Remember, {moral}|Never forget that {moral}]."',
    'when they got home, everyone wanted to hear the story. {name} told it [once, twice, three times|again and again], and each time it got [a little better|a little longer]. But the end was always the same: "[I learned that|And that is how I know that] {moral}." And if you ever come to {place}, you may [hear it still|meet {name} and hear it yourself].',
    '[the sun went down|evening came], and a great calm lay over {place}. {name} and {friend} sat [near {spot}|by {water}] and shared [the last of the {food}|some {food}]. "[What a day|What an adventure]," said {friend}. "[The best one yet|And tomorrow there will be another]," said {name}. [For {moral}|And both of them knew that {moral}].',
)

LATER = (
    "the next morning, ",
    "a few days later, ",
    "that afternoon, ",
    "later that week, ",
    "some time later, ",
    "one evening, ",
    "on the following day, ",
    "soon after that, ",
    "when the next day came, ",
    "not long afterwards, ",
    "",
)

NEXT_PLOT = (
    "for a while, life {in_place} was [peaceful|quiet]. But {name}'s adventures were not over yet.",
    "[some weeks passed|the moon grew round and thin again], and {name} thought that nothing new would ever happen. {He} was wrong.",
    "after that, {name} and {friend} rested for [many days|a whole week]. Then [a new adventure began|something happened again].",
)

EPISODES = (
    "{name} and {friend} [had a picnic|sat down to eat] near {spot}. There was {food}, and [cool water|a pot of tea], and [a cake with seven candles|a basket of cherries]. {friend} told [a joke|a funny story] about [a frog who wanted to be a king|a cloud that was afraid of heights|an ant who bought very small shoes], and {name} laughed so hard that {he} [fell over|got the hiccups]. [It took ten minutes and a glass of water to stop them|The hiccups lasted until evening].",
    'it began to rain. At first it was only [a drop or two|a soft drizzle], then it [poured|came down in buckets]. {name} and {friend} [ran|hurried] to {spot} and [squeezed under a big leaf|found a dry corner]. They watched the [puddles grow|drops race each other]. "[Rain is only the sky washing its face|I like the smell of rain]," said {name}. When it was over, [a rainbow|a great bright rainbow] stood over {place}, and they [counted its colours|tried to find its end].',
    '{name} [helped|met] {elder} the {eanimal}, who was [carrying a heavy basket|looking for {his_elder} glasses|trying to open a jar]. "[Let me do that|May I help you]," said {name}. "[You are a good {animal}|How kind of you]," said {elder}. To say thank you, {elder} told {name} [how the mountains were made|why the sea is salty|about the days when {she_elder} was young]. {name} [listened with both ears|could have listened for hours].',
    '{name} tried to [bake a cake|cook soup|make jam]. {He} took [three cups of flour|a big pot] and [a spoon of honey|a handful of berries], and stirred [to the left|very fast]. But {he} forgot [the sugar|to watch the fire], and soon there was [smoke everywhere|a funny smell]. {friend} [came running|looked in at the window]. "[Is that supper|What happened here]?" {fhe} asked. They looked at the [black lump|strange green mess], and then [they laughed and had {food} instead|they started again, and the second one was delicious].',
    "{name} found [a tiny egg|a small bird with a hurt wing] under a bush near {spot}. {He} [built a soft nest|made a bed of moss] and [kept watch all night|brought it water and crumbs]. {friend} [helped|came to look every day]. [On the third day|After a week] there was a [soft peep|flutter of wings], and the little bird [sat on {name}'s head|sang its first song]. Then it [flew away over the trees|rose into the sky]. {name} waved [until it was only a dot|for a long time].",
    'the two friends played hide and seek. {name} counted to [twenty|ten], [very slowly|without looking]. "[Ready or not, here I come|I am coming now]!" {he} called. {He} looked behind {spot}, and near {water}, and [even under an old bucket|inside a hollow log]. No {friend}! Then {he} heard [a sneeze|a giggle] right above {him}. "[Found you|I can see you]!" cried {name}, and {friend} [tumbled down|came out], [laughing|covered in leaves].',
    'there was a [party|feast] {in_place}, because it was {friend}\'s birthday. [Lanterns hung from every branch|Everyone wore a paper hat], and {elder} the {eanimal} played [the fiddle|an old drum]. {name} gave {friend} [a necklace of shells|a picture {he} had painted|a jar of {food}]. "[It is the best present of all|I will keep it for ever]," said {friend}. They danced until [their feet were sore|the moon was high], and {name} had [two|three] pieces of cake.',
    "{name} could not sleep, so {he} went outside and [lay down on the ground|looked at the sky]. There were more stars than {he} could count. [A shooting star flew by|One of them seemed to wink]. {name} made a wish, but {he} did not tell anyone what it was. [The night was quiet|Far away, somebody was singing]. After a while {friend} [came and lay down beside {him}|joined {him}]. They did not talk. [Sometimes friends do not need words|It was good just to be there].",
    'they came to {water}, and there was no way across. "[We could swim|We could go around]," said {friend}, "but [it is too cold|that would take all day]." {name} [had an idea|looked around]. {He} [found some reeds and tied them together|pulled an old log to the edge], and soon they had a [little raft|small boat]. It [wobbled|spun around twice], and once {friend} [nearly fell in|got wet feet], but they [reached the other side|got across]. "[Captain {name}|What a captain you are]!" said {friend}.',
    '{elder} the {eanimal} asked them a riddle. "[What has hands but cannot clap|What has teeth but cannot bite|What gets wetter the more it dries]?" {friend} [guessed a tree|guessed the wind], but that was wrong. {name} [walked in a circle|scratched {his} head] and thought. [After a long while|All at once], {he} [jumped up|laughed]. "[I know it|I have it]!" {he} said, and whispered the answer. {elder} [nodded|clapped]. "[Clever {animal}|Quite right]," {she_elder} said.',
    '{name} painted a picture of {place}. {He} used [berries for red and leaves for green|mud, chalk and flower petals]. {friend} stood [very still|in the middle of it], because {fhe} was in the picture too. "[Is my nose really that big|Do I look like that]?" asked {friend}. "[In art, yes|It is how I see you]," said {name}. They hung it up [in {home}|where everyone could see it], and people [came from far away to look|said it was a masterpiece].',
    'a [thick|grey] fog rolled in, and {name} could not see [{his} own feet|a step ahead]. "[Stay close|Hold on to me]," {he} told {friend}. They went on [slowly|one step at a time], and talked all the while, so that they would not lose each other. [Somewhere a bell rang|They heard water]. "[That must be {water}|Then home is to the left]," said {name}. [Bit by bit|Little by little] the fog [lifted|grew thin], and there, in the sunshine, was {spot}. They had been [almost home|close by] the whole time.',
    '{name} planted a seed near {spot}. Every day {he} [watered it|sang to it] and [asked it to grow|told it the news]. For a long time [nothing happened|there was only earth]. "[Maybe it is asleep|Be patient]," said {friend}. And then one day there was [a green tip|a tiny leaf]! [It grew and grew|Day by day it got taller], until it was [a sunflower|a flower] as tall as {friend}, [with a golden face|yellow as the sun]. {name} was [prouder than a king|very proud].',
    "[a travelling merchant|a wandering musician] came through {place}, [a tall stork with a red hat|an old goose with a cart]. [He|She] had [bells and ribbons|songs and stories] from [all over the world|far-away lands]. {name} had no money, but {he} [traded some {food}|offered to carry the bags]. For this {he} got [a small brass whistle|a blue ribbon]. {name} [blew it all the way home|gave it to {friend}], and [the whole {kind} heard it|{friend} was delighted].",
    '{name} and {friend} had a quarrel. It was about [a silly thing|nothing at all]: who had [found the biggest shell|eaten the last piece of cake]. "[It was me|You are wrong]!" said one. "[No, me|I am not]!" said the other. They sat [back to back|far apart] and said nothing. [The silence was terrible|After five minutes it grew boring]. Then both said "[I am sorry|Sorry]" at the very same time, and they [had to laugh|burst out laughing]. "[Friends again|Let us never do that again]," said {friend}.',
    'they built a [treehouse|hut|secret camp] near {spot}. {friend} [held the boards|found the branches], and {name} [tied the knots|did the hammering]. It had [a rope ladder|a round door] and [a window with a view|a flag on top]. [At the first try the roof fell in|One wall was crooked], but [nobody minded|that made it special]. When it was ready, they made a rule: "[Everyone is welcome|No grumpy faces]." They [wrote it on the door|shook hands on it].',
    '{name} went to visit {his} grandmother, who lived near {far}. The [way was long|journey took all morning], and {he} [sang|{moves}] along {path}. Grandmother had [made {food}|put {food} on the table]. "[How you have grown|Let me look at you]!" she said. In the afternoon she showed {name} [an old photograph|how to knit|a box of buttons], and told {him} [what {he} had been like as a baby|stories of the old days]. When {name} left, {he} got [a warm scarf|a big hug] for the way home.',
    'there was a strange [footprint|track] on the ground near {spot}. It was [as big as a plate|round, with four dots]. "[A giant|A monster]?" whispered {friend}. {name} [bent down|looked closely]. They followed the tracks [around a bush|along {path}], [and around again|on tiptoe]. Suddenly {name} [stopped|began to laugh]. "[We are following ourselves|These are our own footprints]!" {he} said. "[We have walked in a circle|Look, that is your foot]." {friend} [laughed until {fhe} cried|went quite red].',
    '{name} learned to [swim on {his} back|whistle|stand on {his} head|skip stones]. {friend} was the teacher. "[Again|Once more]," {friend} said, "and [do not think so much|breathe slowly]." {name} tried [ten|twenty] times, and [nine|nineteen] times it went wrong. [{He} got water in {his} nose|{He} bumped {his} head]. "[I cannot do it|It is too hard]," {he} said. "[You cannot do it yet|Not yet]," said {friend}. And the next time, [it worked|{he} did it]! {name} did it again, [just to be sure|all afternoon].',
    'it was very [hot|warm], and everybody {in_place} was [grumpy|tired]. {name} had an idea. {He} [filled shells with water|filled a bucket at {water}] and [splash|whoosh]! {friend} was wet from head to toe. For a moment {fhe} [said nothing|stood quite still]. Then {fhe} [filled a bucket too|grinned]. "[You asked for it|Just you wait]!" {fhe} cried. Soon [everyone|the whole {kind}] was [splashing and shouting|soaking wet], even {elder} the {eanimal}, and nobody was grumpy any more.',
    '{name} wrote a letter to [a cousin|an old friend] who lived [beyond the hills|over the sea]. "[Dear cousin|My dear friend]," {he} wrote, "[here all is well|the weather is fine]. [Yesterday I ate too many berries|{friend} has learned to juggle]. [When will you visit us|Please write soon]." A [pigeon|swallow] took the letter away. [After a week|Ten days later] the answer came: "[I will come in spring|Put the kettle on]." {name} [danced around {spot}|read it aloud to everyone].',
    'they climbed to {far}. The way was [steep|stony], and {friend} [stopped to rest every few steps|was out of breath]. "[Are we there yet|How much further]?" {fhe} asked, again and again. "[Almost|Only a little more]," {name} said each time. But at the top [they forgot their tired legs|they fell silent]. They could see [the whole world|all of {place}], as small as [a toy|a picture in a book]. The wind [played with {name}\'s {feature}|sang in their ears], and they ate their {food} [with the clouds below them|and felt like kings].',
    '{name} found [a mirror|a shiny piece of glass] near {spot}. {He} looked into it, and {an_animal} looked back. "[Hello|Who are you]?" said {name}. The other {animal} moved its mouth, but said nothing. {name} [bowed|made a funny face], and the other one did the same. "[It is copying me|How rude]!" {he} told {friend}. {friend} [looked into it too|giggled]. "[Now there is a {fanimal} in there as well|That is you, silly]," {fhe} said.',
    'the little ones {in_place} wanted to play, so {name} [invented a game|became their teacher for a day]. It was called ["the floor is jelly"|"catch the cloud"|"the sleepy giant"], and the rules were [very simple|so strange that nobody understood them]. [A very small {young_one} won three times|Everyone won, and nobody lost]. "[Again, again|Once more]!" the little ones shouted. In the evening {name} was [so tired that {he} fell asleep on {his} feet|tired but happy].',
    '{name} and {friend} found [an old boat|an old cart] that nobody [used any more|wanted]. They [scrubbed it|painted it blue], and [put a sail on it|gave it new wheels]. "[What shall we call it|It needs a name]," said {friend}. They thought about it [for a whole day|over some {food}]. In the end they called it ["Sunshine"|"the Happy {animal_cap}"|"the Brave Snail"]. On its first trip it [went in circles|squeaked all the way], but [what a trip it was|they waved like kings].',
    '[a loud bang|a crash] woke everybody up. {name} [rushed outside|jumped out of bed]. [An old tree had fallen|A big stone had rolled down] across {path}, and on the other side sat a family [of hedgehogs|of mice] who could not get home. "[All together now|Push]!" said {name}. {friend} pushed, {elder} pulled, and {name} [{sound}|counted to three]. [It moved an inch, and then another|Slowly, slowly it rolled away]. The family [thanked them|said thank you] with [a jar of jam|a song].',
)

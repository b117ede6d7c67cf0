"""The plots of the stories: a problem, beats that work on it, and a resolution, each with a short form."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """`hook` and `mend` are one sentence or two (short stories); `trouble`, `beats`, `ending` are paragraphs."""

    title: str
    thought: str
    hook: str
    mend: str
    trouble: str
    beats: tuple[str, ...]
    ending: str
    moral: str


PLOTS = (
    Plot(
        "the lost {thing}",
        "loses a {thing} and finds it again with the help of a friend",
        "one [morning|day|afternoon], {name} lost {his} [favourite|precious|beloved] {thing}. {He} looked [everywhere|high and low], but it was [gone|nowhere to be seen].",
        "then {friend} the {fanimal} [came to help|offered to help], and together they [found it|spotted it] [behind|under|beside] {spot}.",
        "one [bright|windy|quiet|misty] morning, {name} [woke up|opened {his} eyes] and [noticed|saw at once] that something was wrong. {his} {thing} was gone! [It had been a present from {his} grandmother|{He} had kept it since {he} was very small|It was the most precious thing {he} owned], and {he} [never went anywhere without it|looked at it every night before bed]. {name} [searched every corner|turned everything upside down], but the {thing} was [nowhere to be found|not there].",
        (
            '{name} [hurried|ran] to {friend} [at once|as fast as {he} could]. "[My {thing} has disappeared|I have lost my {thing}]!" [cried {name}|said {name} with a trembling voice]. {friend} the {fanimal} [listened carefully|thought for a moment]. "[When did you last see it|Where were you yesterday]?" {fhe} asked. {name} tried to remember. "[I had it near {spot}|I think I had it by {water}]," {he} said. "Then that is where we [start|shall look first]," said {friend}.',
            'the two friends [followed|went along] {path}, looking [left and right|under every leaf and stone]. They found [a shiny button|an old feather|a broken cup|a blue marble] and [a rusty key|a lost glove|three smooth pebbles], but no {thing}. {name} felt {his} [heart sink|hopes fade]. "[Do not give up|We are not finished yet]," said {friend}. "[Things that are lost are always waiting somewhere|We have only looked in half the places]."',
            'near {spot} they met {elder} the {eanimal}, who was [resting in the shade|enjoying the afternoon]. "A {thing}?" said {elder}. "[I saw something glitter this morning|A magpie dropped something shiny], over by {water}." {name} [thanked {elder} twice|could hardly wait], and the friends [rushed off|set off again with new hope].',
        ),
        'and there it was! Between two [stones|roots], [half hidden|almost covered] by [leaves|sand and dust], lay the {thing}. {name} [picked it up|held it close] and [laughed with joy|could not stop smiling]. "[I would never have found it without you|You are the best friend anyone could have]," {he} said. {friend} [grinned|smiled]. "[Two pairs of eyes are better than one|That is what friends are for]," {fhe} answered.',
        "[some treasures can be held, but the best treasure is a friend who helps you look|a good friend is worth more than any treasure]",
    ),
    Plot(
        "the great storm",
        "gets through a storm and helps everyone repair what it broke",
        "one night a [terrible|mighty|wild] storm blew over {place}. In the morning, {name} saw that {friend}'s home was [broken|ruined].",
        "{name} [gathered all the neighbours|called everyone together], and by [evening|sunset] they had built {friend} a [stronger|new|better] home.",
        'one evening, [dark|heavy|black] clouds [gathered|rolled in] over {place}. The wind [began to howl|grew stronger and stronger], and [rain|hail] came down [in sheets|like a curtain]. {name} [stayed inside|hid in {his} home] and listened to the thunder. "[I hope everyone is safe|I hope {friend} is all right]," {he} whispered. All night long the storm [raged|shook the {kind}], and nobody [slept|closed an eye].',
        (
            'in the morning the [sky was clear|sun came out], but the {kind} looked [different|as if a giant had walked through it]. Branches and stones lay [everywhere|all over the ground]. {name} [made {his} way|hurried] to {friend}\'s home and [gasped|stopped in surprise]. The roof was gone, and {friend} the {fanimal} was sitting [in the middle of the mess|outside], [wet and shivering|cold and sad]. "[Everything is broken|I do not know where to begin]," {fhe} said.',
            '"[Then we will begin together|Do not worry]," said {name}. {He} [went from door to door|called all the neighbours], and soon [a long line of animals|a whole crowd] came to help. Some carried [wood|stones|branches], some [brought food|swept the floor], and {elder} the {eanimal} [told everyone what to do|drew a plan in the dust]. {name} used {his} {feature} [as well as {he} could|to hold things in place], and that made everyone [laugh|cheer].',
            'they worked [until noon|all day long]. When they grew tired, they [sang a song|told jokes|shared {food}]. Once a [beam|big branch] slipped, and {name} caught it [just in time|at the very last moment]. "[Well done|That was close]!" [shouted|called] {elder}. Little by little, [the walls grew|a new home rose] where the old one had been.',
        ),
        'at sunset the new home was [finished|ready]. It had [a strong roof|thick walls] and [a round window|a little blue door]. {friend} [walked around it three times|could not believe {fhis} eyes]. "[It is even better than before|It is the finest home I have ever seen]!" {fhe} said, and [hugged everyone|wiped away a happy tear]. That evening they all [sat together|had supper together] and watched [the stars come out|the moon rise].',
        "[a storm can break a house, but it cannot break a friendship|many helping hands make every job smaller]",
    ),
    Plot(
        "the stranger",
        "makes friends with a lonely newcomer whom the others avoid",
        "one day a [shy|lonely|quiet] {fanimal} called {friend} came to {place}, and nobody [wanted to play with|talked to] {fhim}.",
        "{name} [shared {his} {food}|asked {fhim} to play], and before long {friend} was the [happiest|best-liked] {fanimal} {in_place}.",
        'one day a stranger [arrived|appeared] {in_place}. It was a [shy|quiet|thin] {fanimal} [with a small bag|who carried a little bundle]. The others [stared|whispered to each other]. "[Where does {fhe} come from|What does {fhe} want here]?" they [asked|murmured]. Nobody said hello. {name} saw the stranger [sit down alone|curl up all alone] near {spot}, and {he} [felt sorry for {fhim}|remembered how it feels to be alone].',
        (
            '{name} [took some {food}|packed a basket with {food}] and [{moves} over|went over to the stranger]. "[Hello|Good afternoon]," {he} said. "[My name is {name}|I am {name} the {animal}]. [Would you like some {food}|Are you hungry]?" The {fanimal} looked up [with wide eyes|in surprise]. "[Nobody has spoken to me for days|That is very kind]," {fhe} said. "I am {friend}. [My old home was washed away by a flood|I had to leave my old home], and I have been [walking|travelling] ever since."',
            'from that day on, {name} [showed {friend} everything|was {friend}\'s guide]: {spot}, {water}, and even {path}. {friend} [knew wonderful stories|could whistle beautifully|was very good at making kites]. [They laughed until their sides hurt|The hours flew by]. But the others still [kept away|looked the other way]. "[Give them time|They only need to get to know you]," said {name}.',
            "then one afternoon a [small|little] {young_one} [slipped|fell] into {water}. Everyone [shouted|ran around], but nobody knew what to do. {friend} [did not wait|did not think twice]. {fhe} [grabbed a long branch|threw a rope of grass] and pulled the little one [to safety|out]. [For a moment all was quiet|Everyone held their breath]. Then the whole crowd [cheered|began to clap].",
        ),
        'after that, [everyone wanted to be {friend}\'s friend|no one called {friend} a stranger again]. {elder} the {eanimal} [spoke for all of them|bowed {his_elder} head]. "[We are sorry|We were foolish]," said {elder}. "[Please stay with us|This is your home now]." {friend} [looked at {name}|smiled through {fhis} tears] and [nodded|said yes]. {name} [was the happiest {animal} of all|{sound} for joy].',
        "[a stranger is only a friend you have not met yet|one kind word can change a whole day]",
    ),
    Plot(
        "the big race",
        "enters a race, stops to help someone, and wins something better than a prize",
        "every year there was a race {in_place}, and this year {name} [wanted to win|was sure {he} would win]. But halfway, {friend} the {fanimal} [fell and hurt {fhis} foot|tripped over a stone].",
        "{name} [stopped at once|turned around] and helped {friend} to the finish. They came last, but [everyone cheered|the crowd cheered loudest for them].",
        'every [spring|summer|autumn] a great race was held {in_place}. The winner got [a golden cup|a crown of flowers|a silver bell]. {name} had [dreamed of winning|trained for weeks], getting up before [dawn|breakfast] to [practise|run along {path}]. "[This year I will do it|I can feel it in my bones]," {he} told {friend}. {friend} the {fanimal} [laughed|smiled]. "[Then I had better run fast too|May the best one win]!"',
        (
            'on the day of the race, [flags were waving|the whole {kind} was full of visitors]. {elder} the {eanimal} [raised a flag|stood at the start]. "[Ready? Set? Go|One, two, three, go]!" The racers [shot forward|were off]. {name} [{moves} as fast as {he} could|had never been so quick], past {spot} and along {path}. [The wind whistled in {his} ears|{His} heart beat like a drum]. Soon {he} was [in the lead|ahead of everyone].',
            "halfway through, {name} heard a [cry|thump] behind {him}. {He} looked back. {friend} had [tripped over a root|slipped on a wet stone] and was [lying on the ground|holding {fhis} foot]. The others [ran past|did not stop]. {name} [slowed down|stood still]. [The finish was so close|The cup was almost {his}]. But a friend in trouble [matters more|is more important] than any prize, and {name} knew it.",
            '"[Lean on me|Hold on to me]," said {name}. "[But you were winning|You will lose the race]!" said {friend}. "[It is only a race|There will be other races]," {name} answered. [Step by step|Slowly], the two friends [went on together|made their way] towards the finish. [The sun was already low|Most of the crowd had gone quiet].',
        ),
        'when they [came around the last corner|reached the finish] at last, something [strange|wonderful] happened. [Everyone stood up|The crowd began to clap]. They cheered [louder than they had for the winner|until the hills rang]. {elder} [came forward|stepped up] with [a small wooden medal|a ribbon of gold]. "[The cup is for the fastest|The prize for speed is gone]," {elder} said, "but this is for [the kindest|the biggest heart]." {name} [blushed|did not know what to say], and {friend} [hugged {him}|cheered loudest of all].',
        "[winning is good, but being kind is better|it does not matter who is first, as long as nobody is left behind]",
    ),
    Plot(
        "the old map",
        "follows an old map to a hidden place and discovers what the real treasure is",
        "one day {name} found an old map [inside a bottle|under a stone]. It showed the way to a [hidden|secret] treasure near {far}.",
        "{name} and {friend} the {fanimal} followed it [all day|past {spot}], and at the end they found [a box full of seeds|a garden full of fruit trees], enough for everyone.",
        'one [rainy|lazy|sunny] afternoon, {name} was [tidying up|digging] near {spot} when {he} [found|uncovered] [an old tin box|a dusty bottle]. Inside was a [yellow|crumpled] map! A [dotted|thin red] line led from {spot} to a big cross near {far}. {name}\'s [eyes grew wide|heart beat faster]. "[A treasure map|I must show this to {friend}]!" {he} [cried|said].',
        (
            '{friend} the {fanimal} [studied the map|turned the map around twice]. "[Here is {water}|This must be {path}]," {fhe} said, "and the cross is [a long way off|on the other side]." They packed [{food}|some {food} and a bottle of water], [a rope and a lantern|a warm blanket], and left [before sunrise|the next morning]. [The air was fresh|Dew sparkled everywhere], and {name} [sang a marching song|{moves} ahead happily].',
            'by noon they came to {water}, and the bridge was [gone|broken]. "[What now|How shall we get across]?" asked {friend}. {name} [looked around|thought hard]. Then {he} [tied the rope to a branch|rolled a log into place]. [Slowly and carefully|Holding their breath], they [crossed|made it across]. "[You are clever|That was brilliant]!" said {friend}, and {name} [felt very proud|grinned from ear to ear].',
            'the map led them [up a steep slope|through a dark tunnel] and past {spot}. There they met {elder} the {eanimal}, who [guarded the way|sat on a stone]. "[Only those who answer my riddle may pass|Tell me this]," said {elder}. "[What grows bigger the more you share it|What can you give away and still keep]?" {friend} [frowned|scratched {fhis} head]. But {name} [smiled|looked at {friend}]. "[Friendship|A smile]!" {he} said. {elder} [nodded|laughed] and let them pass.',
        ),
        'at last they stood [by the cross|near {far}]. They dug [until their backs hurt|quickly], and [there was a wooden chest|something went clunk]. Inside there was no gold. There were [hundreds of seeds|little bags of seeds] and a note: "[Plant these and share what grows|Whoever finds this, plant a garden for all]." The friends [looked at each other|laughed]. They carried the chest home and planted a garden, and [by the next summer|soon] there was [fruit and flowers|food] for everyone {in_place}.',
        "[the best treasure is the one you share|a treasure is only worth something when you share it]",
    ),
    Plot(
        "the scary noise",
        "is afraid of a strange noise at night and finds out that it is nothing to fear",
        "every night {name} heard a [strange|scary|spooky] noise near {spot}, and {he} was [afraid|too frightened to sleep].",
        "at last {name} and {friend} the {fanimal} went to look. It was only [a lost little {young_one}|the wind blowing through a hollow log], and they [laughed with relief|laughed and laughed].",
        '{name} was [brave by day|not afraid of anything], but at night it was different. [When the moon rose|As soon as it grew dark], a strange sound [drifted|came] from {spot}. "[Woo-oo-oo|Oooh-hoo|Whoo-whoo]," it went. {name} [pulled the blanket over {his} head|trembled from head to toe]. "[What if it is a monster?|There is something out there,]" {he} whispered. [In the morning {he} was very tired|All night {he} lay awake].',
        (
            '{friend} the {fanimal} saw {name} [yawning|rubbing {his} eyes]. "[Did you not sleep|What is the matter]?" {fhe} asked. {name} [looked at the ground|was ashamed], but then {he} told {friend} everything. {friend} did not laugh. "[I am scared of thunder|Everyone is afraid of something]," {fhe} said. "[Tonight we will listen together|Shall we find out what it is]?" {name} [felt a little better already|nodded bravely].',
            'when night fell, the two friends [sat close together|waited side by side]. {name} held [a lantern|a small lamp]. [The stars came out one by one|An owl called far away]. Then they heard it: "[Woo-oo-oo|Whoo-whoo]!" {friend} [jumped|gulped]. "[It is coming from {spot}|It is louder than I thought]," {fhe} whispered. {name} took a deep breath. "[Come on|Follow me]," {he} said, and {his} voice [hardly shook|was steady].',
            '[step by step|very slowly] they [crept|went] along {path}. [Shadows danced|A twig snapped], and both of them [froze|held their breath]. "[It is only a shadow|It was only a twig]," said {name}. The noise grew [louder|nearer]. At {spot}, {name} [lifted the lantern|held the light high] and [looked|peered into the dark].',
        ),
        'there was no monster. [Behind {spot} sat a tiny {young_one}, singing to {himself_elder} because {she_elder} was lost|An old flute was stuck between two branches, and the wind was playing it]. {name} began to [laugh|giggle], and {friend} laughed too. "[So this is the monster|Is that all]!" {he} said. They [set things right|put everything in order] before they went home, and that night {name} slept [like a stone|better than ever]. Since then, whenever {he} hears something strange, {he} [takes a light and goes to look|takes a friend and finds out].',
        "[most things are less scary when you look at them with a friend|being brave means going on although you are afraid]",
    ),
    Plot(
        "the empty spring",
        "finds out why the water has dried up and brings it back",
        "one [hot|dry] summer the water {in_place} stopped flowing. Everyone was [thirsty|worried].",
        "{name} and {friend} the {fanimal} followed the dry stream and found [a fallen tree|a pile of rocks] in the way. They pushed [together|with all their might], and the water came [rushing|splashing] back.",
        'that summer was the [hottest|driest] anyone could remember. Day after day the sun [burned|blazed] over {place}. Then one morning {water} was [almost empty|dry]. [The flowers drooped|The leaves turned yellow], and the little ones [cried for a drink|were thirsty]. "[What shall we do|Without water we cannot stay here]," said {elder} the {eanimal}. Everyone [was silent|looked worried]. Then {name} [stood up|spoke]. "[I will find out where the water has gone|Somebody must look for it, and I will go]."',
        (
            '{friend} the {fanimal} [came along|would not let {name} go alone]. [Early the next morning|Before the heat began], they [set off|started] along {path}, following the [dry stones|empty bed] where the stream had been. [The ground was hot|Dust rose at every step]. They had only a little water, and they [shared it fairly|took one sip each]. "[One sip for you, one for me|We must make it last]," said {name}.',
            'at noon they rested in the shade of [a big rock|a lonely tree]. {friend} [was very tired|sighed]. "[Maybe there is no water anywhere|Maybe we should turn back]," {fhe} said. {name} [shook {his} head|put {his} ear to the ground]. "[Listen|Wait]! [I can hear something|There is a sound] behind the hill." It was [a soft gurgle|a faint trickle]. [All at once they were not tired any more|They jumped up and ran].',
            'behind the hill they saw it. [A huge tree had fallen|Rocks had tumbled down] and blocked the stream, and behind them lay [a big new lake|a wide pool of clear water]. {name} [pushed|pulled] with all {his} strength, but nothing moved. "[We need a plan|Strength alone will not do it]," {he} said. {friend} found [a long, strong branch|a thick pole]. "[We can use this as a lever|Put it under the end]!"',
        ),
        'together they pushed. One, two, three! The [tree|biggest rock] [shook|creaked], and rolled aside. [With a roar|With a mighty splash], the water [shot forward|burst out] and [raced|danced] down the old streambed. {name} and {friend} [ran beside it all the way home|laughed and got soaked]. {in_place_cap}, everyone was [dancing in the spray|drinking and splashing]. "[Hooray for {name} and {friend}|Three cheers for our heroes]!" they [shouted|cried], and the celebration lasted [until midnight|all night long].',
        "[even a big problem moves when friends push together|those who do not give up will find a way]",
    ),
    Plot(
        "the broken promise",
        "forgets a promise, hurts a friend and learns to say sorry",
        "{name} had promised to help {friend} the {fanimal}, but {he} [forgot|went to play instead], and {friend} was [very sad|hurt].",
        "{name} [said sorry|went to {friend} and said sorry], and worked [all day|until dark] to make it right. {friend} [forgave {him}|smiled again].",
        '{friend} the {fanimal} was [building a boat|planting a garden|making a swing], and {name} had promised to help. "[I will be there at noon|You can count on me]," {name} had said. But that morning [the sun was so warm|the water looked so inviting], and {name} [began to play|fell asleep] near {spot}. [The hours went by|Noon came and went]. When {he} [remembered|looked up], the sun was [already low|going down]. "[Oh no|Oh dear]!" said {name}. "[My promise|I forgot {friend}]!"',
        (
            '{name} ran [as fast as {he} could|all the way], but {he} came too late. {friend} sat [alone|all by {fhimself}], and [everything had fallen over|the work was spoiled], because [it was too heavy for one|nobody had been there to hold it]. "[I waited for you|You promised]," said {friend} quietly. {name} [did not know what to say|wanted to disappear]. {He} [made an excuse|said that it was not {his} fault], and {friend} [turned away|went inside and shut the door].',
            'that evening {name} could not [eat|sleep]. Even {his} {food} [tasted of nothing|stayed on the plate]. {He} went to see {elder} the {eanimal}. "[I have lost my best friend|I did something bad]," {he} said, and told the whole story. {elder} [listened|nodded slowly]. "[Everyone makes mistakes|A mistake is like mud]," said {elder}. "[It only gets worse if you hide it|You have to wash it off]. [What would you like to say to {friend}|You know what to do]."',
            "before the sun was up, {name} [slipped out|went out]. {He} [fetched wood and nails|carried stones and branches] and [began to work|set to work]. {He} [sawed and hammered|pushed and pulled], all alone, until {his} [legs ached|back hurt]. When {friend} [opened the door|came out], {fhe} [could not believe it|rubbed {fhis} eyes]. Everything was [repaired|put right again], and in the middle of it stood {name}, [tired and dusty|covered in dust].",
        ),
        '"[I am sorry|I am so sorry, {friend}]," said {name}. "[I forgot my promise, and then I made an excuse|It was my fault, and I should have said so]." {friend} was quiet for a moment. Then {fhe} [smiled|began to smile]. "[Thank you for saying that|That is all I wanted to hear]," {fhe} said. "[Shall we finish it together|Come, let us have breakfast]." And {name} [never forgot a promise again|kept every promise from that day on].',
        "[saying sorry takes courage, and it mends what is broken|a promise is a small thing to make and a big thing to keep]",
    ),
    Plot(
        "the lost little one",
        "finds a lost child and takes it home through the dark",
        "one evening {name} found a tiny {young_one} [crying|sitting alone] near {spot}. It had lost its mother.",
        "{name} [carried it|took it by the hand] along {path} until they found its mother, who [hugged them both|cried for joy].",
        'the sun was [going down|almost gone] when {name} heard somebody [crying|sobbing] near {spot}. It was a [tiny|very small] {young_one}, with [a dirty face|big wet eyes]. "[What is the matter, little one|Why are you crying]?" asked {name} [gently|softly]. "[I followed a butterfly|I went to pick flowers]," it said, "and now I [cannot find my mother|do not know the way home]." {name} [looked at the dark sky|thought of {his} warm bed]. But {he} could not leave the little one alone.',
        (
            '"[I will take you home|We will find her together]," said {name}. "[What can you see from your home|Tell me what your home looks like]?" The little one [sniffed|thought]. "[There is a tall tree|I can hear water], and [in the evening the moon sits on the hill|there are yellow flowers by the door]." {name} [thought hard|closed {his} eyes]. "[That sounds like {far}|I think I know where that is]," {he} said. "[It is not too far|Come along, we must be quick]."',
            'on the way they met {friend} the {fanimal}, who [carried a lantern|was on {fhis} way home]. "[You will never find it in the dark|Let me come with you]," said {friend}. So they went on, [one behind the other|the three of them], along {path}. The little one was [afraid|tired], so {name} [told it a funny story|hummed a song]. "[Once there was {an_animal} who sneezed so hard that all the apples fell down|Do you know why the moon is round? Because it ate too much cake]," said {name}, and the little one [giggled|laughed].',
            'near {water} they [stopped|lost the way]. There were two paths, and both were dark. {friend} [wanted to go left|pointed to the right]. {name} [sniffed the air|listened]. "[I can smell yellow flowers|I hear somebody calling]," {he} said. "[This way|Follow me]!" They [hurried on|went faster and faster], and then they [saw a light|heard a voice].',
        ),
        '"[My baby|There you are]!" A mother came running [through the dark|out of the shadows] and [wrapped her child in her arms|kissed her little one again and again]. "[I have searched everywhere|I was so worried]," she said. "[How can I ever thank you|You have kind hearts]." {name} [smiled|yawned]. "[Anyone would have done the same|It was a lovely walk]," {he} said. The mother gave them [{food}|hot soup and {food}], and [on the way home|when they left] the moon [lit up the path|shone like silver].',
        "[it only takes one kind heart to bring someone home|nobody is too small to help someone smaller]",
    ),
    Plot(
        "the talent show",
        "believes to be no good at anything, and discovers a talent",
        "everyone {in_place} could do something special, but {name} thought that {he} was [good at nothing|not good at anything].",
        "then {friend} the {fanimal} asked {him} to tell a story, and [everyone listened|nobody wanted it to end]. So {name} found out what {he} could do best.",
        'there was going to be a big show {in_place}. {friend} the {fanimal} would [sing|juggle|dance], and {elder} the {eanimal} would [play the drum|do magic tricks]. "[And what will you do|What is your talent], {name}?" everybody asked. {name} [did not know|looked away]. {He} could not [sing|juggle], {he} could not [dance|do tricks]. "[I am good at nothing|I have no talent at all]," {he} thought, and [a tear rolled down {his} face|{he} went home early].',
        (
            '{friend} came to [visit|see {him}]. "[Let us find your talent|Everybody has a talent]," {fhe} said. "[Yours is only hiding|We just have to look for it]." First {name} tried [juggling|balancing plates], but [everything fell down|one plate after another broke]. Then {he} tried [singing|playing the flute], and [the birds flew away|even the flowers closed]. {name} [sighed|had to laugh]. "[You see|It is hopeless]," {he} said.',
            'that evening some little ones [could not sleep|were afraid of the dark]. {name} sat down beside them. "[Shall I tell you a story|Listen]," {he} said. And {he} told them of [a star that fell into a pond|a whale that wanted to fly|a mountain that learned to dance]. {name} [whispered and roared|did all the voices], and {he} [waved {his} {feature}|jumped up and down] at the exciting parts. The little ones [listened with open mouths|forgot to be afraid].',
            '{friend} had [heard everything|listened from the shadows]. "[That is it|There it is]!" {fhe} cried. "[That is your talent|You are a storyteller], {name}!" {name} [blushed|did not believe it]. "[Is that a talent|But I was only talking]?" {he} asked. "[The best of all|It is a wonderful one]," said {friend}. "[Come to the show|Tell your story at the show], please."',
        ),
        'on the night of the show, {name}\'s [knees were shaking|heart was pounding]. {He} [stepped into the light|looked at all the faces]. Then {he} saw {friend}, who [nodded|smiled], and {he} began. [Nobody coughed, nobody moved|It was so quiet that you could hear the crickets]. When the story was over, there was [a moment of silence|a deep hush], and then [such a storm of applause|such loud cheering] that [the leaves shook|the birds woke up]. "[Another one|More]!" they called. And {name} told [another, and another|one more].',
        "[everyone is good at something, even if it takes time to find it|a talent may hide where you least expect it]",
    ),
    Plot(
        "the longest winter",
        "shares the winter stores when the cold lasts too long",
        "the winter {in_place} was long and cold, and {friend} the {fanimal} had [nothing left to eat|no food left].",
        "{name} had only a little, but {he} [shared it|gave half of it away], and together they [lasted until spring|stayed warm until spring came].",
        'that year the cold came early. [Frost covered {place}|Every morning the ground was white], and the wind was [sharp as a needle|icy]. {name} had [worked hard|been busy all autumn], and {his} [pantry|store] was full of {food}. "[I have enough until spring|Let the cold come]," {he} said, and [sat down by the fire|curled up under a blanket]. But the cold [lasted|went on] week after week, longer than [anyone could remember|ever before].',
        (
            'one [bitter|stormy] evening there was a [knock|soft tap] at the door. Outside stood {friend} the {fanimal}, [shivering|thin and pale]. "[I am sorry to trouble you|I did not know where to go]," said {friend}. "[My food is all gone|I have not eaten for two days]." {name} looked at {his} store. It was [only half full|smaller than {he} had thought]. If {he} shared, [there might not be enough|{he} might be hungry {himself}].',
            'but {name} thought of [all the summers they had played together|the day {friend} had helped {him}]. "[Come in|Come in and get warm]," {he} said. "[What is mine is yours|We will share what there is]." They sat [side by side|close together] and ate {food}, and it tasted [better than ever|wonderful], because [good company is the best spice|they were together]. Outside, the wind [howled|rattled at the door], but inside it was [warm|snug].',
            "the next day {elder} the {eanimal} came as well, with [a sack of flour|a bundle of firewood] but nothing to eat. Then came [two little mice|a family of sparrows] with [a candle|a pot of jam]. {name} [laughed|opened the door wide]. [Each of them had something, and none of them had everything|One had wood, one had light, one had jam], and together they had [enough|all they needed]. They [cooked soup|told stories], they [sang|played games], and the days went by [quickly|like a holiday].",
        ),
        'then one morning {name} woke up to [a drip, drip, drip|the song of a bird]. The [ice was melting|snow was gone]! [Everyone ran outside|They opened the door], and there, by {spot}, stood [the first flower|a tiny green shoot]. "[We made it|Spring is here]!" they [cried|shouted]. {friend} [turned to {name}|took {name}\'s hand]. "[Without you I would not be here|I will never forget this]," {fhe} said. And {he} did not. That autumn, they [filled one big store together|built a store for everyone].',
        "[what you share keeps you warmer than what you keep|a little is enough when it is shared]",
    ),
    Plot(
        "the wish to fly to the moon",
        "tries to reach the moon and learns that home is where the heart is",
        "{name} [dreamed of|wished for] nothing more than to touch the moon. {He} [climbed|tried to climb] to {far}, but the moon was still [too high|far away].",
        "then {friend} the {fanimal} showed {him} the moon [shining|floating] in {water}. {name} touched it [gently|with one careful finger], and {his} wish came true.",
        'every night {name} [looked up at|watched] the moon. "[It is so round and bright|How beautiful it is]," {he} [sighed|said]. "[If only I could touch it|I want to touch it just once]." {friend} the {fanimal} [laughed kindly|shook {fhis} head]. "[Nobody can touch the moon|The moon is very far away]," {fhe} said. But {name} had [made up {his} mind|a plan]. "[Tomorrow I will climb to {far}|From {far} it must be close enough]," {he} said.',
        (
            "the next day they [built a ladder|tied branches into a long ladder]. It was [tall|taller than the tallest tree] and [wobbled|a little crooked]. That night {name} [climbed up|went up], step by step, while {friend} held it [steady|with all {fhis} strength]. {name} [stretched|reached out] as far as {he} could. The moon [smiled down|only shone], [as far away as before|no nearer than before]. Then the ladder [creaked|swayed], and [bump|crash]! {name} landed in [a heap of leaves|something soft].",
            '"[Are you hurt|Oh, {name}]?" cried {friend}. "[Only a little|Not at all]," said {name}, "but [I was so close|I shall try again]." So they [travelled|went] to {far}. It took [all day|two days], along {path} and past {spot}. On the way they asked {elder} the {eanimal} for advice. "[The moon is closer than you think|You are looking in the wrong place]," said {elder}, and [winked|would not say another word].',
            'at {far} the night was [clear|cold and still]. {name} [jumped|stood on the highest point and jumped], again and again. The moon stayed where it was. At last {he} [sat down|let {his} head hang]. "[I will never reach it|It was a silly wish]," {he} said. {friend} [sat down beside {him}|put an arm around {him}]. They [looked down|turned around], and far below they saw [{place} in the moonlight|the little lights of home]. "[How small and beautiful it looks|I miss it]," said {name}.',
        ),
        '[when they came home|back home], {friend} [suddenly stopped|gave a shout]. "[Look|{name}, come here]!" {fhe} said, and pointed at {water}. There lay the moon, [round and silver|bright and still], [floating on the water|right before them]. {name} [bent down|came closer] and touched it with [a single finger|the tip of {his} nose]. It [trembled|rippled] and [tickled|sparkled]. "[I touched the moon|I did it]!" {he} [whispered|laughed]. "[And I did not even have to leave home|It was here all the time]."',
        "[what we look for far away is often waiting at home|some wishes come true in ways we do not expect]",
    ),
)

"""Word lists of the test prompts: plain English, and no word of a list inside another one of it.

Answers are found by string match, so that "melon" must not be found in "watermelon". ``tests/test_tasks.py`` checks it.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# First halves of keys.
ADJECTIVES = _words("""
    amber ancient autumn bitter blue bold brave brisk broad broken busy calm careful cheerful clever cloudy coastal
    copper cosmic crimson crisp curious daring deep distant dusty eager early eastern elegant faithful famous fancy
    fearless floral frozen fuzzy gentle giant gifted glossy golden graceful grand green handy happy hasty hidden hollow
    honest humble icy idle jolly joyful keen kind lazy lively lonely lucky lunar magenta marble mellow merry mighty
    misty modest narrow nimble noble northern olive orange patient plain playful polite proud purple quick quiet rapid
    rough royal rural rustic salty scarlet secret shiny silent silver simple sleepy smooth sober solar southern steady
    sturdy sunny tender tidy tiny tropical upper urban velvet violet vivid warm wild windy wise wooden yellow young
    zesty
""")

# Second halves of keys, and the words of word lists.
NOUNS = _words("""
    acorn airport album alley almond anchor ankle apple apron arena armor arrow artist atlas author avocado badge bagel
    balcony balloon bamboo banana bandage banjo banner barley basket beach beacon beard beetle belt bench bicycle
    biscuit blanket blossom bonfire bottle boulder bracelet breeze brick bridge broom bubble bucket buffalo bullet
    burger butter button cabbage cabin cactus camera canal candle canoe canvas canyon captain caravan carpet carrot
    castle cathedral cattle caution cedar ceiling cello cement cereal chalk chapter cherry chest chicken chimney chorus
    cider cinema circle circus citizen clarinet climate clinic closet cloud clover cobbler coconut coffee collar colony
    comet compass concert cookie coral corner cottage cotton couch country cousin cradle crane crayon cricket crocus
    crown crystal cupboard curtain cushion customer cyclone daisy dancer deadline debate decade deputy desert diamond
    diary dinner diploma dolphin donkey doorway dragon drawer drum eagle echo eclipse editor elbow elephant elevator
    ember emerald emperor engine envelope estate evening expert fabric factory falcon family farmer feather fence fern
    festival fiddle finger flame flannel flute folder forest fortune fossil fountain freezer friend fruit funnel galaxy
    gallery garage garlic gazelle geyser ginger giraffe glacier glove goblet gorilla grain grape gravel guest guitar
    hammer hammock harbor harvest hedge helmet heron highway hinge history hockey holiday honey horizon hospital hotel
    hunter hydrant iceberg igloo insect island ivory jacket jaguar jasmine jelly jewel journal judge juice jungle kayak
    ketchup kettle keyboard kingdom kitten kiwi knight ladder lagoon lantern laptop laundry lawyer leather lemon lens
    lentil leopard letter lettuce lever lily lizard llama lobster locket lotus luggage lumber machine magazine magnet
    mango mansion maple market meadow medal melody melon mermaid meteor mirror mitten monkey monsoon monument morning
    mosaic motor mountain museum mushroom musket napkin necklace needle nephew nickel notebook novel nurse nutmeg oasis
    ocean octopus officer onion opera orbit orchid ostrich otter outlet oven oyster paddle painting palace pancake panda
    panther papaya parade parcel parrot pasture peach peanut pebble pelican pencil penguin pepper perfume piano picnic
    pigeon pillow pilot pirate pistachio planet plaster platform plum pocket poem polar pony poplar poster potato
    prairie present prince pudding pulley pumpkin puppet pyramid quarry quartz queen quilt rabbit raccoon radish railway
    rainbow raisin ranch raven recipe referee reptile rescue ribbon rider river robin rocket rooster rubber ruby saddle
    sailor salmon sandal satchel saucer sausage scarf school scissors scooter sculptor season shadow shampoo shelf
    shelter sheriff shoulder shovel sidewalk singer sister skeleton sketch sleigh slipper snail soldier sonnet spider
    spinach sponge spruce squirrel stadium statue steam stream street student subway sugar sultan summer supper surgeon
    swallow sweater swing symbol tailor tavern teacher teapot temple tennis thimble thread throne thunder ticket tiger
    timber toaster tobacco tomato tornado tortoise tourist tractor traffic trailer tribune trophy truffle trumpet tunnel
    turkey turnip turtle tuxedo twilight uncle unicorn uniform vacuum vanilla vehicle vessel village vinegar viola
    visitor volcano voyage waffle wagon waiter wallet walnut walrus warrior weasel weather wedding whale wheel whisker
    whistle widow willow window winter wizard wombat worker yogurt zebra zipper zucchini
""")

# Who did something in a fact.
NAMES = _words("""
    Adebayo Agnes Aisha Alejandro Amira Anders Beatriz Bernard Bruno Camille Chidi Clara Dalia Dmitri Edith Elena Emil
    Farid Fatima Felix Freya Gabriel Greta Hassan Hector Helga Hugo Ingrid Isabel Ivana Jasper Joanna Jonas Julian
    Kamala Kenji Klaus Laila Leonard Linnea Lorenzo Magnus Malika Marcel Marta Mateo Miriam Nadia Naomi Nikolai Olga
    Oscar Pavel Petra Priya Rafael Ramona Rashid Rosalind Samuel Sanjay Selma Simone Sofia Stefan Susan Tamara Teresa
    Tobias Ulrich Valentina Victor Wanda Yasmin Yusuf Zainab
""")

# What it was done with.
THINGS = _words("""
    backpack basket bicycle blanket bracelet bucket calendar camera candlestick chessboard clock compass corkscrew diary
    dictionary envelope globe hammer helmet jacket kettle kite ladder lamp lantern letter microscope mirror necklace
    notebook painting passport photograph pillow postcard raincoat scarf skateboard sledge suitcase sunglasses teapot
    telescope tent thermometer toolbox toothbrush torch typewriter umbrella vase wallet wheelbarrow whistle wristwatch
""")

# Answers: where something was left.
PLACES = _words("""
    attic bakery bathroom boathouse bookshop brewery canteen cathedral cellar chapel cinema cloakroom conservatory
    cottage courtyard dungeon farmyard fountain garage graveyard greenhouse gymnasium hallway harbour hospital infirmary
    kitchen laundry library lighthouse monastery museum nursery observatory orchard pantry pharmacy playground
    restaurant sawmill schoolyard shipyard stable staircase supermarket tavern theatre treehouse vineyard warehouse
    windmill
""")

# Answers: of whom something was bought (all take the article a).
TRADES = _words("""
    beekeeper blacksmith bricklayer butcher butler carpenter chimneysweep coachman cobbler dancer dentist ferryman
    fireman fisherman florist gardener goldsmith hairdresser hunter jeweller judge lawyer librarian locksmith magician
    mechanic milkman miner musician painter plumber policeman postman potter priest sailor sculptor shepherd surgeon
    tailor teacher waiter watchmaker weaver
""")

# Answers: what something was swapped for (all take the article a).
SWAPS = _words("""
    banjo bathtub bookcase cabbage canary cello cheesecake clarinet cucumber cupboard donkey goldfish guitar hammock
    hedgehog melon necktie pancake parrot piano pineapple pumpkin rabbit sandwich saucepan teaspoon tortoise trampoline
    tricycle trumpet violin waistcoat wardrobe
""")

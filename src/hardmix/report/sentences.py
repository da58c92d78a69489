"""The sentences of the report, of the live page and of the explore page, as templates."""

from collections.abc import Sequence

# -- what was run

RUNS = "{runs}: {methods}."
TRAINED_ON = "Trained on {data}{sizes}."
NETWORK = "Backbone {backbones}, {epochs} epochs, batches of {batches}."
NETWORK_AND_QUEUE = (
    "Backbone {backbones}, {epochs} epochs, batches of {batches}, a queue of {queues} keys."
)
MOCHI = (
    "MoCHi (N, s, s') mixes the N hardest negatives of a query: s points from two of them, s'"
    " points from one and the query itself."
)

OWN_IMAGES = "Images of {data}"

# -- what is missing

NOT_EVALUATED = "{run}: no evaluation yet; try hardmix knn and hardmix linear."
NO_LABELS = "{run}: its images have no labels, so there are no false negatives and no k-NN."
UNFINISHED = "{run}: training is unfinished (epoch {done} of {last})."
STALE = "{run}: results/{name}.json was measured when {setting} was {then}; it is now {now}."
NO_NUMBER = "{run}: results/{name}.json has no number that this page can show."
SAME_SEED = (
    "{runs} have the same settings and the same seed {seed}: the table counts each of them, but"
    " they are not independent."
)
OMITTED = "{run}: {file} was omitted to keep the page small."
NOT_SHOWN = "{run}: figures/{file} cannot be shown: {reason}."
NO_PICTURES = "No {pictures} of {runs}: hardmix report RUN creates it."
NOT_MADE = "No {pictures} of {path}: {reason}"
NO_VERDICT = "{run}: results/verdict.json has no sentence."

# -- the progress of a run

STATES = {
    "running": "Training.",
    "done": "Done after {done:,} steps.",
    "stopped": "Stopped after {done:,} steps; resume with hardmix pretrain --resume.",
    "failed": "Failed after {done:,} steps.",
    "lost": "Its process ended unexpectedly after {done:,} steps.",
}
IN_EPOCH = "Training, epoch {epoch} of {epochs}."
NOT_STARTED, SO_FAR = "Not started yet.", "{done:,} steps so far."

# -- exploring images

IMAGES_OF = "{images} of {name}"
DUPLICATES = "{groups} of near-duplicates: {images} could be removed."
NO_DUPLICATES = "No near-duplicates."
OUTLIERS, NO_OUTLIERS = "{images} unlike all others.", "No image stands out."
FLAWED = "{flaws}, such as blur."
LEAKS = "{leaks} between groups."
UNREADABLE = "{files} cannot be read and are missing here: quality.csv lists them."
CONFLICTS = "{labels} in conflict with the neighbours."

MANY_DUPLICATES = (
    "So many near-duplicates may be images that only this encoder cannot distinguish: inspect some"
    " before you delete any, or raise --agreement."
)
DOUBTFUL_LABELS = (
    "Only {agreement:.0%} of the labels agree with most of their neighbours: this encoder does not"
    " separate the classes well enough to judge labels."
)
NO_CLUSTERS = "No clusters: clustering needs pip install 'hardmix[analysis]'."

ABOUT_DUPLICATES = (
    "The most certain groups come first. The first image of each is the one to keep: the largest"
    " without its border, unedited, in the largest file. {folder}/duplicates.csv lists them."
)
ABOUT_LEAKS = (
    "An image, and its copy in another group. Copies between training and test images make a test"
    " easier than it is. {folder}/leaks.csv lists all."
)
ABOUT_QUALITY = (
    "Found by plain measures of the pixels and sizes of the files, which stand below each image."
    " {folder}/quality.csv and exact-copies.csv list them."
)
EXACTNESS = (
    "How exact this is, measured on these images: of the first {first} by colours and layout,"
    " {hits:.1f} are among the {near} nearest by features."
)
ABOUT_CLUSTERS = (
    "k-means on the features; each cluster starts with its most typical images. Its name is the"
    " most common class, or a word from the file names. {folder}/clusters.csv lists all."
)
FARTHEST = "{images} stand out, and come first; others follow in order."
NONE_FARTHEST = "No image stands out clearly; these have the fewest images like them."
ABOUT_SCORES = (
    "The number is how much farther the 20th nearest image is than it is for those 20 images."
    " {folder}/outliers.csv ranks all images."
)
ABOUT_LABELS = (
    "Each image's label, and below it the most common label of the 20 nearest images."
    " {agreement:.0%} of all labels agree with most of their neighbours."
    " {folder}/suspect-labels.csv lists them."
)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 run, 2,000 images."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Return words as a list in a sentence: a, b and c."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))

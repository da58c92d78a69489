"""The paper's grids by name: the rows of its tables, in the paper's order.

A row is in the paper's units (K = 16384, 200 epochs); `config_at` turns it into a config. Methods
whose numbers the paper copied from others have rows too, so that they can be trained. Imports no
torch.
"""

import difflib
from dataclasses import replace
from typing import Any

from hardmix.errors import InputError
from hardmix.settings.methods import MethodName
from hardmix.sweep.grid_rows import (
    RESTARTED,
    Evaluation,
    Grid,
    Mix,
    Row,
    make_row,
)
from hardmix.sweep.own_grids import ENDING, read_grid

BEST: Mix = (1024, 1024, 128)
"""The setting of ImageNet-100 that the paper uses most."""

_SUPERVISED = (
    "here: a linear classifier on the supervised trunk; the paper does not describe its supervised"
    " training"
)
_PLAIN = "the paper does not say how it was scheduled; here: one plain schedule"
_RESTART = "continues the finished run of 200 epochs (App. C.1)"
_ALL_QUEUE = (
    "the paper does not define it; here: the synthetic points replace the real negatives"
    " (mix.real_negatives drop_all)"
)


# -- rows that the paper copied

V1_TEMPERATURE, V2_TEMPERATURE = 0.07, 0.2
"""Temperatures of MoCo's two versions."""

COST: tuple[Evaluation, ...] = ("linear", "knn", "embedding", "cost")
ON_IMAGENET1K: tuple[Evaluation, ...] = ("linear", "voc", "knn", "embedding", "cost")
"""Measurements of a row; at small scales VOC needs --voc-root."""

LIKE_V1 = (
    ("data.augmentation", "moco-v1"),
    ("model.head", "linear"),
    ("optimizer.schedule", "step"),
)
"""Settings of MoCo's first version, besides its temperature."""

NOTE = "copied by the paper; here with its authors' settings, as far as they are known"


def copied_on_imagenet100(source: str) -> tuple[Row, ...]:
    """Return MoCo + iMix, CMC and CMC + iMix of Table 1."""
    return (
        copied_row("unmix", "MoCo+iMix", source, temperature=V1_TEMPERATURE, changes=LIKE_V1),
        copied_row("cmc", "CMC", source),
        copied_row("cmc", "CMC+iMix", source, changes=(("cmc.unmix", True),)),
    )


def copied_on_imagenet1k(
    source: str, supplement: bool = False, evaluations: tuple[Evaluation, ...] = ON_IMAGENET1K
) -> tuple[Row, ...]:
    """Return the other methods of Table 2 at 200 epochs, and those that only the supplement has."""
    common: dict[str, Any] = {"recipe": "imagenet1k", "evaluations": evaluations}
    like_v1 = {"temperature": V1_TEMPERATURE, "changes": LIKE_V1}
    large = f"{NOTE}; the paper's number is for batches of 8192, the preset has 4096"
    pcl = copied_row("pcl", "PCL", source, **common, changes=LIKE_V1)
    pcl_v2 = copied_row("pcl", "PCL v2", source, **common)
    co2 = copied_row("co2", "MoCo-v2+CO2", source, **common)
    return (
        copied_row("simclr", "SimCLR", source, **common, note=large),
        copied_row("unmix", "MoCo+Image Mixture", source, **common, **like_v1),
        copied_row("instdis", "InstDis", source, **common),
        moco_v1(source, *evaluations),
        copied_row("pirl", "PIRL", source, **common),
        *((pcl, pcl_v2, co2) if supplement else ()),
        infomin(source, *evaluations),
    )


def swav(source: str) -> Row:
    """Return SwAV after 800 epochs, as in Table 2."""
    fields: dict[str, Any] = {"recipe": "imagenet1k", "evaluations": ON_IMAGENET1K}
    return copied_row("swav", "SvAV", source, **fields, epochs=800, label="SwAV, 800 epochs")


def moco_v1(source: str, *evaluations: Evaluation) -> Row:
    """Return MoCo's first version as its authors trained it on ImageNet-1k."""
    return copied_row(
        "moco-v1",
        "MoCo",
        source,
        recipe="imagenet1k",
        temperature=V1_TEMPERATURE,
        evaluations=evaluations,
    )


def supervised_on_imagenet1k(source: str, evaluation: Evaluation) -> Row:
    """Return detectors that start from supervised weights, as copied from MoCo's paper."""
    return copied_row(
        "supervised",
        "supervised",
        source,
        recipe="imagenet1k",
        evaluations=(evaluation,),
        label="Supervised",
        read="supervised",
        note="read from the results of detect --from supervised, of any run in DIR",
    )


def infomin(source: str, *evaluations: Evaluation) -> Row:
    """Return MoCo-v2 with InfoMin's views and jigsaw, with which PyContrast reached 70.1."""
    return copied_row(
        "moco-v2",
        "InfoMin Aug.",
        source,
        recipe="imagenet1k",
        temperature=0.15,
        changes=(("data.augmentation", "infomin"), ("loss.jigsaw", 0.5)),
        evaluations=evaluations,
    )


def copied_row(method: MethodName, printed: str, source: str, **fields: Any) -> Row:
    """Return a row of a method that the paper calls `printed`."""
    usual = {"label": printed, "note": NOTE, "evaluations": COST}
    return make_row(method, printed=printed, source=source, **usual | fields)


# -- the paper's tables


def _table1() -> tuple[Row, ...]:
    source = "table1"
    mixes: list[Mix] = [BEST, (1024, 256, 512), (1024, 128, 256)]
    rows = (
        make_row("moco-v1", temperature=V1_TEMPERATURE, source=source),
        make_row("moco-v1", temperature=V2_TEMPERATURE, source=source),
        make_row("moco-v2", source=source),
        *(make_row("mochi", mix, source=source) for mix in mixes),
        make_row("moco-v2", oracle=True, source=source),
        make_row("mochi", BEST, oracle=True, source=source),
        make_row("supervised", source=source, note=_SUPERVISED),
    )
    costs = tuple(replace(row, evaluations=COST) for row in rows)
    return *copied_on_imagenet100(source), *costs


SUPPLEMENT: tuple[Mix, ...] = (
    *((16384, 1024, 0), (16384, 0, 1024), (16384, 0, 256)),
    *((2048, 1024, 0), (2048, 512, 0), (2048, 512, 256)),
    *((1024, 1024, 0), (1024, 1024, 128), (1024, 512, 0), (1024, 0, 512), (1024, 256, 512)),
    *((1024, 128, 256), (1024, 128, 0), (1024, 0, 128), (1024, 0, 256)),
    *((512, 128, 0), (512, 512, 0), (512, 128, 128), (256, 256, 0), (256, 512, 0)),
    *((128, 128, 0), (64, 64, 0)),
)
"""(N, s, s') of the supplementary table at K = 16384; it has (1024, 0, 512) twice."""


def _table1_supp() -> tuple[Row, ...]:
    source = "table1_supp"
    smaller = [
        row
        for queue in (4096, 1024)
        for row in (
            make_row("moco-v2", queue_size=queue, source=source),
            make_row("mochi", BEST, queue_size=queue, source=source),
        )
    ]
    return (
        make_row("moco-v2", epochs=100, source=source),
        make_row("mochi", BEST, epochs=100, source=source),
        make_row("mochi", (1024, 128, 256), epochs=100, source=source),
        *copied_on_imagenet100(source),
        make_row("moco-v1", temperature=V1_TEMPERATURE, source=source),
        make_row("moco-v1", temperature=V2_TEMPERATURE, source=source),
        make_row("moco-v2", source=source),
        *(make_row("mochi", mix, source=source) for mix in SUPPLEMENT),
        *smaller,
        make_row(
            "mochi",
            BEST,
            queue_size=1024,
            changes=(("mix.real_negatives", "drop_all"),),
            label=f"MoCHi {BEST}, K = 1024 (all queue)",
            source=source,
            note=_ALL_QUEUE,
        ),
        make_row("moco-v2", epochs=800, source=source, note=_RESTART),
        make_row("mochi", BEST, epochs=800, source=source, note=_RESTART),
        make_row("moco-v2", oracle=True, source=source),
        make_row("mochi", BEST, oracle=True, source=source),
        make_row("mochi", BEST, oracle=True, epochs=400, source=source, note=_PLAIN),
        make_row("mochi", BEST, oracle=True, epochs=800, source=source, note=_RESTART),
        make_row("supervised", source=source, note=_SUPERVISED),
    )


def _fig3a() -> tuple[Row, ...]:
    mixes: list[Mix] = [
        *((128, 128, 0), (256, 256, 0), (512, 512, 0), (1024, 512, 0), (1024, 1024, 0)),
        *((2048, 512, 0), (2048, 1024, 0), (16384, 1024, 0)),
    ]
    return make_row("moco-v2", source="fig3a"), *(
        make_row("mochi", mix, source="fig3a") for mix in mixes
    )


def _fig3b() -> tuple[Row, ...]:
    mixes = [(1024, s, q) for s in (0, 128, 256, 512, 1024) for q in (0, 128, 256, 512) if s or q]
    return make_row("moco-v2", source="fig3b"), *(
        make_row("mochi", mix, source="fig3b") for mix in mixes
    )


_TABLE2: dict[int, tuple[Mix, ...]] = {
    100: ((256, 512, 0), (256, 512, 256), (128, 1024, 512)),
    200: (
        *((1024, 512, 256), (512, 1024, 512), (256, 512, 0), (256, 512, 256)),
        *((256, 2048, 2048), (128, 1024, 512)),
    ),
    800: ((128, 1024, 512),),
    1000: ((512, 1024, 512), (128, 1024, 512)),
}
_TABLE2_SUPP: dict[int, tuple[Mix, ...]] = {
    100: ((512, 1024, 512), *_TABLE2[100]),
    200: (
        *((1024, 256, 128), (1024, 512, 256), (1024, 0, 512), (512, 1024, 512), (256, 512, 0)),
        *((256, 512, 256), (256, 2048, 2048), (128, 1024, 512), (64, 1024, 512)),
    ),
    800: _TABLE2[800],
    1000: _TABLE2[1000],
}
_TABLE3: dict[int, tuple[Mix, ...]] = {
    100: ((256, 512, 0), (128, 1024, 512)),
    200: ((256, 512, 0), (128, 1024, 512), (512, 1024, 512)),
}


def _sections(
    source: str, sections: dict[int, tuple[Mix, ...]], *evaluations: Evaluation
) -> dict[int, tuple[Row, ...]]:
    """Return the parts of a table by length of training: MoCo-v2, then MoCHi."""
    notes = {RESTARTED: _RESTART, 1000: _PLAIN}
    parts = {}
    for epochs, mixes in sections.items():
        fields: dict[str, Any] = {"recipe": "imagenet1k", "epochs": epochs, "source": source}
        fields |= {"evaluations": evaluations, "note": notes.get(epochs, "")}
        mixed = [make_row("mochi", mix, **fields) for mix in mixes]
        if epochs == 1000:  # the paper has no MoCo-v2 of this length
            parts[epochs] = tuple(mixed)
        else:
            parts[epochs] = make_row("moco-v2", **fields), *mixed
    return parts


def _table2() -> tuple[Row, ...]:
    source, parts = "table2", _sections("table2", _TABLE2, *ON_IMAGENET1K)
    return (
        *parts[100],
        *copied_on_imagenet1k(source),
        *parts[200],
        swav(source),
        *parts[800],
        *parts[1000],
        supervised_on_imagenet1k(source, "voc"),
    )


def _table2_supp() -> tuple[Row, ...]:
    source, parts = "table2_supp", _sections("table2_supp", _TABLE2_SUPP, *ON_IMAGENET1K)
    mixed = next(each for each in parts[1000] if each.mix == (512, 1024, 512))
    return (
        *parts[100],
        *copied_on_imagenet1k(source, supplement=True),
        *parts[200],
        swav(source),
        *parts[800],
        *parts[1000],
        supervised_on_imagenet1k(source, "voc"),
        replace(mixed, oracle=True, label=f"MoCHi {mixed.mix}, oracle, 1000 epochs"),
    )


def _table3() -> tuple[Row, ...]:
    source = "table3_coco"
    evaluations: tuple[Evaluation, ...] = ("coco", "knn", "embedding")
    parts = _sections(source, _TABLE3, *evaluations)
    return (
        supervised_on_imagenet1k(source, "coco"),
        *parts[100],
        moco_v1(source, *evaluations),
        infomin(source, *evaluations),
        *parts[200],
    )


def _fig2() -> tuple[Row, ...]:
    """Fig. 2b and 2c: MoCo at its default tau, pairs alone, both kinds of points, both oracles."""
    evaluations: tuple[Evaluation, ...] = ("proxy", "linear", "knn", "embedding")
    fields: dict[str, Any] = {"evaluations": evaluations}
    return (
        make_row("moco-v1", temperature=V1_TEMPERATURE, source="table1", **fields),
        make_row("moco-v2", source="table1", **fields),
        make_row("mochi", (1024, 1024, 0), source="table1_supp", **fields),
        make_row("mochi", BEST, source="table1", **fields),
        make_row("moco-v2", oracle=True, source="table1", **fields),
        make_row("mochi", BEST, oracle=True, source="table1", **fields),
    )


TEMPERATURES = (0.07, 0.12, 0.3)
"""Other values of tau for App. B.3, which names none."""


def _temperature() -> tuple[Row, ...]:
    """App. B.3: mixing and the temperature are two ways to make the loss more peaky."""
    note = (
        "the paper says in words that mixing goes beyond tuning tau, and has no number (App. B.3)"
    )
    evaluations: tuple[Evaluation, ...] = ("linear", "knn", "embedding", "proxy")
    fields: dict[str, Any] = {"evaluations": evaluations}
    rows = [make_row("moco-v2", source="table1", **fields)]
    rows.append(make_row("mochi", BEST, source="table1", **fields))
    for tau in TEMPERATURES:
        rows.append(make_row("moco-v2", temperature=tau, note=note, **fields))
        rows.append(make_row("mochi", BEST, temperature=tau, note=note, **fields))
    return tuple(rows)


def _proxy() -> tuple[Row, ...]:
    """App. B.1: tau is 0.2 throughout."""
    steps = (("cosine", "optimizer.schedule", "cosine"), ("MLP", "model.head", "mlp"))
    evaluations: tuple[Evaluation, ...] = ("proxy", "linear", "knn", "embedding")
    first = make_row(
        "moco-v1", temperature=V2_TEMPERATURE, source="table1", evaluations=evaluations
    )
    rows = [replace(first, label="MoCo")]
    for name, setting, value in steps:
        last = rows[-1]
        rows.append(
            replace(
                last,
                label=f"{last.label} + {name}",
                changes=(*last.changes, (setting, value)),
                source="",
                note="the paper has a curve and no number (App. B.1)",
            )
        )
    label = f"{rows[-1].label} + augmentation = MoCo-v2"
    rows.append(make_row("moco-v2", label=label, source="table1", evaluations=evaluations))
    return *rows, make_row("mochi", BEST, source="table1", evaluations=evaluations)


_ALTERNATED: Mix = (1024, 1024, 1024)
"""s and s' of "50 % of the top N" are only limits: with s' = 128 there would be pairs alone after
128 turns."""
_BY_KEY: tuple[Mix, ...] = ((1024, 1024, 0), (1024, 0, 512), BEST)
"""Ranking by key is ablated for pairs, for points with the query, and for both (App. B.2)."""
_VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    ("mixed with key", {"strategy": "mixed-with-key"}, "about 0.1 to 0.2 below MoCHi"),
    ("logits times beta", {"strategy": "beta-weighted"}, "slightly below MoCHi"),
    (
        "logits times 1 - beta",
        {"strategy": "one-minus-beta-weighted"},
        "nothing; our interpretation",
    ),
    ("logits plus log beta", {"strategy": "log-beta-weighted"}, "nothing; our interpretation"),
    *(
        (
            f"softmax-sampled, tau' = {t}",
            {"strategy": "softmax-sampled", "sampling_temperature": t},
            "10 to 30 below, for different tau'",
        )
        for t in (0.05, 0.2, 1.0)
    ),
    ("50 % of the top N", {"strategy": "fixed-percentage"}, "inconclusive"),
    (
        "50 % of the top N, falling to 0",
        {"strategy": "fixed-percentage", "percentage_end": 0.0},
        "future work",
    ),
]
"""Names, settings of `mix`, and the words of App. B.2 about each."""


def _variants() -> tuple[Row, ...]:
    """App. B.2. The paper does not state (N, s, s'), tau' or X: they are our choice."""
    by_key = "ranked by key", {"strategy": "ranked-by-key"}, "about 0.2 below MoCHi"
    chosen = [(mix, *by_key) for mix in _BY_KEY]
    for name, changes, words in _VARIANTS:
        alternates = changes["strategy"] == "fixed-percentage"
        chosen.append((_ALTERNATED if alternates else BEST, name, changes, words))
    rows = [
        make_row(
            "mochi",
            mix,
            label=f"MoCHi {mix}, {name}",
            changes=tuple((f"mix.{setting}", value) for setting, value in changes.items()),
            note=f"the paper says (App. B.2): {words}",
        )
        for mix, name, changes, words in chosen
    ]
    return (
        make_row("moco-v2", source="table1"),
        *(make_row("mochi", mix, source="table1_supp") for mix in _BY_KEY),
        *rows,
    )


# Seeds are the paper's: at least 3 runs in Table 1 (App. C.1), one elsewhere.
GRIDS: dict[str, Grid] = {
    "table1": Grid("Table 1", _table1()),
    "table1-supp": Grid("Table 1 of the appendix", _table1_supp(), seeds=1),
    "fig3a": Grid("Fig. 3a", _fig3a(), seeds=1),
    "fig3b": Grid("Fig. 3b", _fig3b(), seeds=1),
    "table2": Grid("Table 2", _table2(), seeds=1),
    "table2-supp": Grid("Table 2 of the appendix", _table2_supp(), seeds=1),
    "table3": Grid("Table 3", _table3(), seeds=1),
    "fig2": Grid("Fig. 2", _fig2(), seeds=1),
    "proxy": Grid("App. B.1", _proxy(), seeds=1),
    "variants": Grid("App. B.2", _variants(), seeds=1),
    "temperature": Grid("App. B.3", _temperature(), seeds=1),
}


def grid_named(name: str) -> Grid:
    """Return a grid of the paper or of a file; raises InputError for an unknown name."""
    if name.endswith(ENDING):
        return read_grid(name)
    if name not in GRIDS:
        known = difflib.get_close_matches(name, GRIDS, n=len(GRIDS), cutoff=0.0)
        raise InputError(
            f"there is no grid {name!r}: choose one of {', '.join(known)}, or your own file that"
            f" ends in {ENDING}."
        )
    return GRIDS[name]

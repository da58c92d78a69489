"""The numbers in figures equal those computed by hand on tiny real runs."""

import base64
import dataclasses
import importlib.util
import io
import json
import math
import shutil

import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

import ranks
from hardmix import alignment, uniformity
from hardmix.analysis import embedding
from hardmix.analysis.accuracy_grids import Place, embedding_space, fig3c, grid_pictures
from hardmix.analysis.analyze import analyze, compare, portray
from hardmix.analysis.embedding import effective_rank, measure, singular_values, tsne
from hardmix.analysis.hardness import matching_probabilities, similarities
from hardmix.analysis.over_training import (
    MOST_POINTS,
    WITH_POINTS,
    Curve,
    curve,
    false_negatives,
    fig2b,
    thin,
)
from hardmix.analysis.picture import svg
from hardmix.analysis.toy_sphere import toy_sphere
from hardmix.commands import main as cli
from hardmix.data.loading import open_loader
from hardmix.data.sources import open_images
from hardmix.data.thumbnails import sample_ids
from hardmix.errors import InputError
from hardmix.evaluation.features import Features
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.methods.base import Materials, TrainingPosition, build_method
from hardmix.models.encoders import build_encoder
from hardmix.runs.folder import Run
from hardmix.runs.reading import RunRecord, read_runs, tell_apart
from hardmix.runtime.device import choose_compute
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import method_title
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import settings as settings_of
from hardmix.training.pretrain import pretrain
from hardmix.training.step import compute_gradients

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

TRAIN = {"queue_size": 32, "log_every": 2, "knn_every": 0, "precision": "fp32"}


def tiny(method="mochi", oracle=False, *, train=None, data=None, **more) -> PretrainConfig:
    data = {"num_images": 48} | (data or {})
    return ranks.tiny(method, oracle, train=TRAIN | (train or {}), data=data, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Run]:
    """Two runs, trained once; tests that write copy them."""
    folder = tmp_path_factory.mktemp("trained")
    return {name: pretrain(tiny(name), folder / name) for name in ("mochi", "moco-v2")}


@pytest.fixture(scope="module")
def analyzed(trained, tmp_path_factory) -> Run:
    """The MoCHi run with all its figures."""
    folder = tmp_path_factory.mktemp("analyzed") / "run"
    shutil.copytree(trained["mochi"].path, folder)
    analyze([folder])
    return Run(folder)


@pytest.fixture
def mochi(trained, tmp_path) -> Run:
    shutil.copytree(trained["mochi"].path, tmp_path / "mochi")
    return Run(tmp_path / "mochi")


def made_up(path, config=None, metrics=(), **results) -> Run:
    """Write a run folder that was never trained."""
    run = Run.create(path, config or tiny())
    for line in metrics:
        run.log(line)
    run.results.mkdir()
    for name, result in results.items():
        (run.results / f"{name.replace('_', '-')}.json").write_text(json.dumps(result))
    return run


def read(*runs: Run) -> list[RunRecord]:
    return read_runs([run.path for run in runs])


def command(capfd, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in arguments])
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return done.value.code or 0, shown.out + shown.err


def facts(folder, name) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


# --- over training


def test_curves_are_the_lines_of_the_metrics(trained):
    (picture,) = [each for each in compare(read(*trained.values()))[0] if each.name == "fig2b"]
    lines = {(line["run"], line["kind"]): line for line in picture.numbers["lines"]}
    assert len(lines) == 3  # without synthetic points there is one line
    for key, kind in [
        ("proxy_accuracy", "real negatives only"),
        ("proxy_accuracy_mixed", "with synthetic points"),
    ]:
        logged = [line for line in trained["mochi"].metrics() if key in line]
        line = lines["MoCHi (16, 8, 4)", kind]
        expected = [each["step"] / 3 for each in logged]  # 48 / 16
        assert line["x"] == pytest.approx(expected, rel=1e-5)
        assert line["y"] == pytest.approx([each[key] for each in logged], rel=1e-5)
    assert ("MoCo-v2", "with synthetic points") in lines


def test_matching_probabilities_keep_first_and_last_rank(trained):
    (picture,), missing = matching_probabilities(read(trained["mochi"]))
    assert missing == []
    logged = trained["mochi"].hardness()
    shown = picture.numbers["runs"][0]["epochs"]
    assert [each["epoch"] for each in shown] == [-1, 0, 1]
    for each, line in zip(shown, logged, strict=True):
        assert each["rank"][0] == 1
        assert each["rank"][-1] == 2  # a sixteenth of the queue
        assert each["probability"] == [line["matching_probability"][r - 1] for r in each["rank"]]


def test_similarities_are_the_recorded_histograms(trained):
    (picture,), _ = similarities(*read(trained["mochi"]))
    kinds = {each["kind"]: each["epochs"] for each in picture.numbers["kinds"]}
    assert [len(epochs) for epochs in kinds.values()] == [2, 2, 1, 1]  # mixed after its warm-up
    counts = trained["mochi"].hardness()[-1]["with_query"]
    share = kinds["points mixed with the query"][0]["share"]
    assert share == pytest.approx([count / sum(counts) for count in counts], abs=1e-6)


def test_an_oracles_false_negatives_are_those_a_count_finds(tmp_path):
    config = tiny(oracle=True, train={"queue_size": 1500})
    run = Run.create(tmp_path / "run", config)
    method = build_method(config, Materials(choose_compute("cpu", "fp32"))).train()
    images, loader = open_loader(config.data, config.train, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, len(images), (1500,), generator=generator)
    keys = torch.randn(1500, config.model.dim, generator=generator)
    method.memory.enqueue(keys, images.labels[ids], ids)
    batch = next(iter(loader.epoch(1)))
    outcomes = compute_gradients(method, batch, TrainingPosition(6, 1))
    run.log({"step": 12, "epoch": 1, **method.describe(outcomes)})
    assert false_negatives(read(run)) == (
        [],
        ["No Fig. 2c: the runs logged false negatives only once."],
    )
    run.log({"step": 18, "epoch": 1, **method.describe(outcomes)})
    (picture,), _ = false_negatives(read(run))
    lines = {line["kind"]: line["y"][0] for line in picture.numbers["lines"]}

    outcome, plan = outcomes[-1].contrast, outcomes[-1].plan
    of_queue, false = method.memory.labels.tolist(), 0
    for row, label in enumerate(batch.labels.tolist()):
        similarity = outcome.real[row].tolist()
        highest = sorted(range(1500), key=lambda slot: -similarity[slot])[: 1500 // 16]
        false += sum(of_queue[slot] == label for slot in highest)
    assert lines["false among the highest negatives"] == pytest.approx(
        false / (1500 // 16 * len(batch.labels)), rel=1e-5
    )
    assert false > 0
    parents = torch.cat([plan.base, plan.partner[:, :8]], dim=1)
    mixed = method.memory.labels[parents] == batch.labels[:, None]
    assert not mixed.any()
    assert lines["pair points with a false parent"] == 0
    assert "Oracle runs" in picture.caption


def test_figures_of_many_runs_have_a_panel_or_a_name_for_each():
    """With up to six, lines share axes and have a legend."""
    names = [f"run {number}" for number in range(7)]
    lines = [Curve(n, WITH_POINTS, k, [0.5, 1.5], [0.1, 0.2]) for k, n in enumerate(names)]
    few, many = fig2b(lines[:6]).figure, fig2b(lines).figure
    assert len(few.axes) == 1
    titles = [axes.get_title(loc="left") for axes in many.axes]
    assert titles == [*names, "", ""]  # three columns
    assert all(len(axes.lines) == 7 for axes in many.axes[:7])
    assert "One panel per run" in fig2b(lines).caption
    places = [Place(name, hue, 0.1 * hue, -1.0) for hue, name in enumerate(names)]
    assert not fig3c(places[:6]).figure.axes[0].texts
    assert [text.get_text() for text in fig3c(places).figure.axes[0].texts] == names
    assert not fig3c(places).figure.legends


def test_long_curves_are_thinned_to_means():
    values = [float(i % 10) for i in range(10 * MOST_POINTS)]
    assert thin(values) == [4.5] * MOST_POINTS
    assert thin([1.0, 2.0]) == [1.0, 2.0]


def test_what_is_no_number_is_left_out_of_a_curve(tmp_path):
    lines = [
        {"step": 5, "epoch": 0, "loss": 1.0},
        {"step": 10, "epoch": 0, "loss": math.nan},
        {"step": 10, "epoch": 0},
        {"step": "x", "epoch": 0, "loss": 2.0},
        {"step": 20, "epoch": 1, "loss": 3.0},
    ]
    (record,) = read(made_up(tmp_path / "run", metrics=lines))
    assert curve(record.metrics, "loss") == ([0.5, 2.0], [1.0, 3.0])


@pytest.mark.parametrize(
    ("method", "oracle", "changes", "name"),
    [
        ("moco-v1", False, {}, "MoCo"),
        ("moco-v1", False, {"optimizer": {"schedule": "cosine"}}, "MoCo + cosine"),
        (
            "moco-v1",
            False,
            {"optimizer": {"schedule": "cosine"}, "model": {"head": "mlp"}},
            "MoCo + cosine + MLP",
        ),
        ("moco-v2", False, {}, "MoCo-v2"),
        ("moco-v2", True, {}, "MoCo-v2 oracle"),
        ("moco-v2", False, {"model": {"head": "linear"}}, "MoCo-v2 without MLP"),
        ("moco-v2", False, {"data": {"augmentation": "plain"}}, "MoCo-v2 with plain views"),
        ("mochi", True, {}, "MoCHi (128, 128, 16) oracle"),
        (
            "mochi",
            False,
            {"mix": {"strategy": "mixed-with-key"}},
            "MoCHi (128, 128, 16) mixed-with-key",
        ),
        ("supervised", False, {}, "supervised"),
    ],
)
def test_runs_have_the_papers_names(method, oracle, changes, name):
    config = RECIPES["demo"].build(method, oracle)
    for group, values in changes.items():
        part = dataclasses.replace(getattr(config, group), **values)
        config = dataclasses.replace(config, **{group: part})
    assert method_title(settings_of(config)) == name


def test_runs_that_differ_by_their_seed_are_named_by_it(tmp_path):
    config = PretrainConfig()
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=5))
    plain = dataclasses.replace(config, method="moco-v2")
    chosen = {"long-name-a": config, "long-name-b": other, "c": plain}
    runs = [Run.create(tmp_path / name, each) for name, each in chosen.items()]
    labels = [record.label for record in read(*runs)]
    mochi = method_title(settings_of(config))
    assert labels == [f"{mochi}, seed 0", f"{mochi}, seed 5", "MoCo-v2"]


def test_runs_of_one_name_are_told_apart_by_the_settings_in_which_they_differ(tmp_path):
    config = PretrainConfig()
    train = dataclasses.replace(config.train, queue_size=4096, temperature=0.1)
    chosen = [
        config,
        dataclasses.replace(config, train=dataclasses.replace(train, seed=1)),
        dataclasses.replace(config, train=train),
    ]
    runs = [Run.create(tmp_path / str(i), each) for i, each in enumerate(chosen)]
    k, tau = config.train.queue_size, config.train.temperature
    mochi = method_title(settings_of(config))
    assert [record.label for record in read(*runs)] == [
        f"{mochi}, K = {k}, tau = {tau}, seed 0",
        f"{mochi}, K = 4096, tau = 0.1, seed 1",
        f"{mochi}, K = 4096, tau = 0.1, seed 0",
    ]


def test_settings_of_mixing_do_not_name_a_run_without_mixing():
    settings = [{"method": "moco-v2", "mix.strategy": each} for each in ("mochi", "ranked-by-key")]
    assert tell_apart(["MoCo-v2"] * 2, settings) == ["MoCo-v2"] * 2
    mixed = [{**each, "method": "mochi"} for each in settings]
    assert tell_apart(["MoCHi"] * 2, mixed) == ["MoCHi", "MoCHi, ranked-by-key"]
    assert tell_apart(["a", "b"], mixed) == ["a", "b"]


def test_a_curve_of_many_epochs_has_a_point_for_each():
    lines = [
        {"step": 2 * epoch + half + 1, "epoch": epoch, "loss": epoch + half}
        for epoch in range(10)
        for half in (0, 1)
    ]
    epochs, losses = curve(lines, "loss")
    assert epochs == losses == [epoch + 0.5 for epoch in range(10)]
    late = [line if line["epoch"] else {**line, "loss": None} for line in lines[:16]]
    after_warm_up = curve(late, "loss")
    assert after_warm_up[0] == [epoch + 0.5 for epoch in range(1, 8)], "eight epochs, seven logged"
    assert curve(lines[:6], "loss")[0] == [0.5, 1, 1.5, 2, 2.5, 3]


def test_equal_names_are_told_apart_by_their_folders(tmp_path):
    runs = [made_up(tmp_path / name / "run") for name in ("a", "b")]
    runs.append(made_up(tmp_path / "c", tiny("moco-v2")))
    labels = [record.label for record in read(*runs)]
    assert len(set(labels)) == 3
    assert labels[2] == "MoCo-v2"
    assert [label.rpartition(", ")[2] for label in labels[:2]] == ["a/run", "b/run"]


# --- results


def grid(tmp_path, cells) -> list[Run]:
    runs = []
    for number, (mix, seed, top1) in enumerate(cells):
        method = "moco-v2" if mix is None else "mochi"
        counts = dict(zip(("num_hardest", "num_pairs", "num_with_query"), mix or (), strict=False))
        config = tiny(method, mix=counts, train={"seed": seed})
        runs.append(made_up(tmp_path / str(number), config, knn={"top1": top1, "data": "shapes"}))
    return runs


def test_gains_are_means_over_seeds_over_the_baselines_mean(tmp_path):
    runs = grid(
        tmp_path,
        [
            (None, 0, 0.50),
            (None, 1, 0.54),
            ((16, 8, 0), 0, 0.55),
            ((16, 8, 0), 1, 0.59),
            ((16, 8, 4), 0, 0.51),
            ((32, 8, 0), 0, 0.60),
        ],
    )
    (over_n, gains), missing = grid_pictures(read(*runs))
    assert missing == []
    assert over_n.numbers["baseline"]["accuracy"] == pytest.approx(0.52)
    assert over_n.numbers["baseline"]["runs"] == 2
    cells = {
        (c["num_hardest"], c["num_pairs"], c["num_with_query"]): c for c in over_n.numbers["cells"]
    }
    assert cells[16, 8, 0]["accuracy"] == pytest.approx(0.57)
    assert cells[16, 8, 0]["deviation"] == pytest.approx(0.04 / math.sqrt(2), abs=1e-6)
    assert cells[32, 8, 0]["runs"] == 1
    assert gains.numbers["num_hardest"] == 16
    found = {(c["num_pairs"], c["num_with_query"]): c["gain"] for c in gains.numbers["cells"]}
    assert found == pytest.approx({(0, 0): 0.0, (8, 0): 5.0, (8, 4): -1.0})  # fmt: skip


def test_only_runs_that_differ_in_nothing_else_are_compared(tmp_path):
    runs = grid(tmp_path, [((16, 8, 0), 0, 0.5), ((16, 8, 4), 0, 0.5)])
    longer = tiny("moco-v2", train={"epochs": 4})
    runs.append(made_up(tmp_path / "longer", longer, knn={"top1": 0.9, "data": "shapes"}))
    other = tiny(train={"epochs": 4})
    runs.append(made_up(tmp_path / "other", other, knn={"top1": 0.9, "data": "shapes"}))
    pictures, missing = grid_pictures(read(*runs))
    assert [picture.name for picture in pictures] == ["fig3a"]
    assert pictures[0].numbers["baseline"] is None
    assert any("other is omitted" in sentence for sentence in missing)
    assert any("no MoCo-v2 run" in sentence for sentence in missing)


def test_the_papers_linear_evaluation_goes_before_others(tmp_path):
    scores = {"linear": 0.7, "linear_cached": 0.6, "knn": 0.5}
    results = {name: {"top1": value} for name, value in scores.items()}
    runs = [made_up(tmp_path / m, tiny(m), **results) for m in ("moco-v2", "mochi")]
    alone, missing = grid_pictures(read(*runs))
    assert alone == []  # one point
    assert missing == ["No Fig. 3a and 3b: they compare (N, s, s'), and only one was run."]
    runs.append(made_up(tmp_path / "fewer", tiny(mix={"num_pairs": 4}), **results))
    (picture, _), _ = grid_pictures(read(*runs))
    assert picture.numbers["measure"] == "Linear evaluation top-1"
    assert picture.numbers["cells"][0]["accuracy"] == 0.7


# --- the features


def test_effective_rank_counts_equal_directions():
    assert effective_rank(torch.ones(7, dtype=torch.float64)) == pytest.approx(7)
    assert effective_rank(torch.tensor([1.0, 0.0, 0.0]).double()) == pytest.approx(1)
    shares = torch.tensor([0.75, 0.25]).double()
    by_hand = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert effective_rank(3 * shares) == pytest.approx(by_hand)


def test_singular_values_are_those_of_the_centred_unit_features():
    features = torch.randn(20, 6) * torch.rand(20, 1)
    unit = normalize(features.double(), dim=1)
    expected = torch.linalg.svdvals(unit - unit.mean(dim=0))
    torch.testing.assert_close(singular_values(features), expected, rtol=1e-6, atol=1e-9)


def test_collapsed_features_are_warned_of():
    direction = torch.randn(1, 64)
    labels = torch.arange(200) % 4
    narrow = direction + 1e-3 * torch.randn(200, 1) * torch.randn(1, 64)
    measured, _ = measure(Features(narrow, labels, torch.arange(200)))
    assert "collapsed" in measured["warning"]
    wide, _ = measure(Features(torch.randn(200, 64), labels, torch.arange(200)))
    assert wide["warning"] is None


def test_unlabelled_features_have_no_alignment_and_say_so():
    unknown = torch.full((20,), -1)
    measured, missing = measure(Features(torch.randn(20, 4), unknown, torch.arange(20)))
    assert measured["alignment"] is None
    assert measured["uniformity"] < 0
    assert len(missing) == 1


def test_alignment_and_uniformity_are_those_of_the_test_features(analyzed):
    images = open_images(analyzed.config().data, "test", 0)
    encoder = load_encoder(analyzed.path)
    with torch.no_grad():
        features = encoder(torch.stack([encoder.preprocess(each) for each in images.tensor]))
    result = facts(analyzed.results, "embedding")
    assert result["alignment"] == pytest.approx(alignment(features, images.labels), rel=1e-3)
    assert result["uniformity"] == pytest.approx(uniformity(features), rel=1e-3)
    assert (result["split"], result["images"]) == ("test", 48)


def test_alignment_and_uniformity_are_drawn_for_two_runs_not_for_one(analyzed, tmp_path):
    pictures, missing = embedding_space(read(analyzed))
    assert pictures == []
    assert "only one" in missing[0]
    other = made_up(tmp_path, tiny("moco-v2"), embedding={"alignment": 0.5, "uniformity": -2.0})
    (picture,), missing = embedding_space(read(analyzed, other))
    assert missing == []
    ours, theirs = picture.numbers["places"]
    assert ours["alignment"] == facts(analyzed.results, "embedding")["alignment"]
    assert (theirs["alignment"], theirs["uniformity"]) == (0.5, -2.0)


def test_the_map_has_every_image_and_small_thumbnails(analyzed):
    numbers = facts(analyzed.figures, "embedding-map")["numbers"]
    images = open_images(analyzed.config().data, "test", 0)
    assert len(numbers["x"]) == len(numbers["y"]) == 48
    assert numbers["label"] == images.labels.tolist()
    assert numbers["classes"] == list(images.classes)
    assert {each["point"] for each in numbers["thumbnails"]} == set(range(48))
    for each in numbers["thumbnails"][:5]:
        assert each["name"] == f"shapes[{each['point']}]"
        assert each["file"] == ""
        assert decoded(each["image"]).shape[:2] == (32, 32)  # never enlarged
    assert (analyzed.figures / "embedding-map.json").stat().st_size < 900_000


def test_a_map_is_the_same_for_the_same_seed():
    vectors = torch.randn(60, 8)
    assert torch.equal(tsne(vectors, 3), tsne(vectors, 3))
    with pytest.raises(InputError, match="5001"):
        tsne(torch.randn(5001, 2), 0)


# --- the gallery


def decoded(uri: str) -> torch.Tensor:
    data = base64.b64decode(uri.partition(",")[2])
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(
        image.height, image.width, 3
    )


def ranked_by_hand(run: Run, index: int):
    """Return the query's embedding, and the checkpoint's queue."""
    tensors, _, _ = run.load_checkpoint()
    config, prefix = run.config(), "objective.pair.query."
    encoder = build_encoder(config.model, 3, image_size=32).eval()
    encoder.load_state_dict(
        {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
    )
    image = load_encoder(run.path).preprocess(open_images(config.data, "train", 0).image(index))
    with torch.no_grad():
        query = encoder(image[None])[0]
    memory = {name: tensors[f"objective.memory.{name}"] for name in ("keys", "labels", "ids")}
    return query, memory


def test_the_gallery_is_the_ranking_of_the_checkpoints_queue(analyzed):
    images = open_images(analyzed.config().data, "train", 0)
    queries = facts(analyzed.figures, "gallery")["numbers"]["queries"]
    assert [query["id"] for query in queries] == sample_ids(images, 0)
    for query in queries:
        embedded, memory = ranked_by_hand(analyzed, query["id"])
        ranking = [
            (float(embedded @ key), int(index), int(label))
            for key, index, label in zip(
                memory["keys"], memory["ids"], memory["labels"], strict=True
            )
            if int(index) != query["id"]
        ]
        ranking.sort(reverse=True)
        shown = query["hardest"]
        assert [each["id"] for each in shown] == [index for _, index, _ in ranking[:8]]
        assert [each["similarity"] for each in shown] == pytest.approx(
            [similarity for similarity, _, _ in ranking[:8]], abs=2e-4
        )
        asked = int(images.labels[query["id"]])
        assert [each["false"] for each in shown] == [label == asked for _, _, label in ranking[:8]]
        assert [each["label"] for each in shown] == [
            images.classes[label] for _, _, label in ranking[:8]
        ]


def test_a_points_similarity_follows_from_its_parents(analyzed):
    kinds = set()
    for query in facts(analyzed.figures, "gallery")["numbers"]["queries"]:
        embedded, memory = ranked_by_hand(analyzed, query["id"])
        slot = {int(index): number for number, index in enumerate(memory["ids"])}
        hardest = (memory["keys"] @ embedded).topk(17).indices.tolist()
        assert [p["similarity"] for p in query["synthetic"]] == sorted(
            (p["similarity"] for p in query["synthetic"]), reverse=True
        )
        assert len(query["synthetic"]) == 4
        for point in query["synthetic"]:
            kinds.add(point["kind"])
            slots = [slot[each["id"]] for each in point["parents"]]
            assert set(slots) <= set(hardest)
            keys = memory["keys"][slots]
            partner = keys[1] if point["kind"] == "pair" else embedded
            mixed = normalize((1 - point["share"]) * keys[0] + point["share"] * partner, dim=0)
            assert point["similarity"] == pytest.approx(float(mixed @ embedded), abs=1e-3)
    assert "query" in kinds


def test_the_gallerys_images_are_those_of_the_ids(analyzed):
    images = open_images(analyzed.config().data, "train", 0)
    query = facts(analyzed.figures, "gallery")["numbers"]["queries"][0]
    for each in [query, *query["hardest"], *query["synthetic"][0]["parents"]]:
        pixels = images.image(each["id"]).permute(1, 2, 0).float()
        assert float((decoded(each["image"]).float() - pixels).abs().mean()) < 25
        other = images.image((each["id"] + 7) % len(images)).permute(1, 2, 0).float()
        assert float((decoded(each["image"]).float() - other).abs().mean()) > 25
    assert (analyzed.figures / "gallery.json").stat().st_size < 1_000_000


def test_sample_images_come_from_different_classes():
    images = open_images(tiny().data, "train", 0)
    chosen = sample_ids(images, 0)
    assert chosen == sample_ids(images, 0)
    assert chosen != sample_ids(images, 1)
    assert len({int(images.labels[index]) for index in chosen}) == len(chosen) == 8


# --- what is missing


def test_a_moco_run_has_a_gallery_without_points_and_no_synthetic_lines(trained, tmp_path):
    shutil.copytree(trained["moco-v2"].path, tmp_path / "run")
    pictures, missing = portray(*read(Run(tmp_path / "run")))
    assert missing == []
    (shown,) = [each for each in pictures if each.name == "gallery"]
    assert all(query["synthetic"] == [] for query in shown.numbers["queries"])


def test_what_a_run_lacks_is_said_and_the_rest_drawn(mochi):
    shutil.rmtree(mochi.checkpoints)
    mochi.encoder_file.unlink()
    mochi.hardness_file.unlink()
    analysis = analyze([mochi.path])
    assert {picture.name for _, picture in analysis.pictures} == {"fig2b", "fig2c"}
    said = " ".join(analysis.missing)
    for words in ("no checkpoint", "no encoder.safetensors", "hardness.jsonl", "No Fig. 3a", "3c"):
        assert words in said


def test_images_that_are_gone_or_changed_are_said(mochi, tmp_path):
    config = json.loads(mochi.config_file.read_text())
    config["data"] |= {"name": "folder", "root": str(tmp_path / "gone")}
    mochi.config_file.write_text(json.dumps(config))
    pictures, missing = portray(*read(mochi))
    assert {picture.name for picture in pictures} == {"fig2a", "similarity-histograms"}
    assert sum("gone" in sentence for sentence in missing) == 2
    config["data"] |= {"name": "shapes", "root": None, "num_images": 47}
    mochi.config_file.write_text(json.dumps(config))
    assert any("images have changed" in sentence for sentence in portray(*read(mochi))[1])


def test_images_without_labels_are_shown_without_classes(tmp_path):
    for index in range(24):
        file = tmp_path / "images" / f"{index}.png"
        file.parent.mkdir(exist_ok=True)
        pixels = torch.randint(0, 255, (36, 40), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(file)
    data = {"name": "folder", "root": str(tmp_path / "images"), "num_images": None}
    config = tiny(
        data={**data, "channels": 1, "workers": 0},
        mix={"num_hardest": 8, "warm_up_epochs": 0},
        train={"epochs": 1, "batch_size": 8, "queue_size": 16},
    )
    analysis = analyze([pretrain(config, tmp_path / "run").path])
    pictures = {picture.name: picture.numbers for _, picture in analysis.pictures}
    assert set(pictures["embedding-map"]["label"]) == {-1}
    for query in pictures["gallery"]["queries"]:
        assert query["label"] is None
        assert {each["false"] for each in query["hardest"]} == {None}
    assert "fig2c" not in pictures
    said = " ".join(analysis.missing)
    assert "No alignment" in said
    assert "No Fig. 2c" in said


def test_a_checkpoint_of_another_network_is_said(mochi):
    config = json.loads(mochi.config_file.read_text())
    config["model"]["dim"] = 64
    mochi.config_file.write_text(json.dumps(config))
    assert any("does not fit its config" in sentence for sentence in portray(*read(mochi))[1])


def test_a_supervised_run_has_no_queue(tmp_path):
    run = made_up(tmp_path / "run", tiny("supervised"))
    assert any("method supervised has no queue" in sentence for sentence in portray(*read(run))[1])


def test_comparing_survives_any_folder(trained, tmp_path):
    empty = made_up(tmp_path / "empty", tiny("moco-v2"))
    (tmp_path / "older").mkdir()
    (tmp_path / "older/config.json").write_text('{"method": "mochi", "unknown": 1}')
    (tmp_path / "older/metrics.jsonl").write_text(
        '{"step": 6, "epoch": 0, "proxy_accuracy": 0.5}\n7\n[]\n{"step": 12, "epo'
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_bytes(b"\xff{")
    (tmp_path / "broken/metrics.jsonl").write_bytes(b"\xff\xfe\n")
    (tmp_path / "broken/hardness.jsonl").write_text(
        '{"epoch": 0, "matching_probability": "x"}\n{"matching_probability": [0.5]}\n{"epoch": 1}'
    )
    strange = made_up(
        tmp_path / "strange", tiny("moco-v2"), knn={"top1": "high"}, linear=[1], embedding={}
    )
    (strange.results / "finetune.json").write_text("{")
    folders = [empty, Run(tmp_path / "older"), Run(tmp_path / "broken"), strange]
    pictures, missing = compare(read(*folders, trained["mochi"]))
    assert {"fig2a", "fig2b", "fig2c"} <= {picture.name for picture in pictures}
    (proxy,) = [picture for picture in pictures if picture.name == "fig2b"]
    assert {line["run"] for line in proxy.numbers["lines"]} == {
        "MoCHi (?, ?, ?)",  # nothing is guessed
        "MoCHi (16, 8, 4)",
    }
    said = " ".join(missing)
    for words in (
        "empty: metrics.jsonl is missing",
        "does not know unknown",
        "broken: config.json is damaged",
        "results/finetune.json is damaged",
    ):
        assert words in said
    assert all(svg(picture).endswith("</svg>\n") for picture in pictures)
    assert compare([])[0] == []


def test_comparing_without_the_extra_says_so(trained, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    pictures, missing = compare(read(trained["mochi"]))
    assert pictures == []
    assert "hardmix[analysis]" in missing[0]
    with pytest.raises(InputError, match=r"hardmix\[analysis\]"):
        analyze([trained["mochi"].path])


# --- the command line


def test_analyze_writes_every_figure_and_names_it(analyzed):
    names = {file.name for file in analyzed.figures.iterdir()}
    drawn = ["embedding-map", "feature-spectrum", "fig2a", "fig2b", "fig2c"]
    drawn.append("similarity-histograms")
    expected = {f"{name}.{kind}" for name in drawn for kind in ("svg", "png", "json")}
    assert names == expected | {"gallery.png", "gallery.json"}


def test_a_second_analysis_looks_at_no_image(analyzed, capfd, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("features are extracted again")

    monkeypatch.setattr(embedding, "extract", refuse)
    before = (analyzed.figures / "gallery.json").stat().st_mtime_ns
    code, shown = command(capfd, "analyze", analyzed.path)
    assert code == 0
    assert shown.count("up to date") == 3
    assert f"Wrote {analyzed.figures / 'fig2b.svg'}" in shown
    assert (analyzed.figures / "gallery.json").stat().st_mtime_ns == before


def test_several_runs_are_compared_in_a_folder_of_their_own(analyzed, tmp_path, capfd):
    measured = {"alignment": 0.5, "uniformity": -2.0}
    other = made_up(tmp_path / "other", tiny("moco-v2"), embedding=measured)
    out = tmp_path / "comparison"
    code, shown = command(capfd, "analyze", analyzed.path, other.path, "--out", out)
    assert code == 0
    assert {"fig2a.svg", "fig2b.svg", "fig2c.png", "fig3c.json"} <= {f.name for f in out.iterdir()}
    assert "other: metrics.jsonl is missing, so it has no curves." in shown


def test_the_toy_sphere_is_the_same_each_time(tmp_path, capfd):
    options = ["--num-memory", 40, "--num-hardest", 8, "--num-pairs", 6, "--num-with-query", 4]
    for name in ("a", "b"):
        code, shown = command(capfd, "toy", "--out", tmp_path / name, *options)
        assert code == 0
        assert str(tmp_path / name / "fig1.svg") in shown
    for kind in ("svg", "png", "json"):
        first, second = (tmp_path / name / f"fig1.{kind}" for name in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()
    groups = {g["kind"]: len(g["x"]) for g in facts(tmp_path / "a", "fig1")["numbers"]["groups"]}
    assert groups == {
        "memory": 32,
        "hardest negatives": 8,
        "pair points": 6,
        "points with the query": 4,
        "query": 1,
    }
    settings = {"num_memory": 40, "num_hardest": 8, "num_pairs": 6, "num_with_query": 4}
    assert toy_sphere(seed=1, **settings).numbers != facts(tmp_path / "a", "fig1")["numbers"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyze"], "name at least one run"),
        (["analyze", "nowhere"], "nowhere is not a run"),
        (["toy", "--num-hardest", "9999"], "9999"),
        (["toy", "--num-memory", "9999"], "9999"),
        (["toy", "--seed", "x"], "seed"),
    ],
)
def test_bad_input_is_one_message(arguments, words, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, shown = command(capfd, *arguments)
    assert code == 2
    assert words in shown
    assert list(tmp_path.iterdir()) == []

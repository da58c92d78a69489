"""Commands that judge or use a finished run, end to end on small real images."""

import csv
import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import hardmix
from hardmix.commands import main as cli
from hardmix.commands.argv import data_of_run, scan
from hardmix.data.imagenet100 import SYNSETS
from hardmix.errors import InputError
from hardmix.evaluation import finetune, linear
from hardmix.evaluation.evaluated_run import EvaluatedRun, _num_classes, open_evaluated_run
from hardmix.evaluation.features import features_of
from hardmix.evaluation.finetune import balanced_subset
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import OWN_TRUNK, Run
from hardmix.settings.evaluations import LINEAR_PRESETS, LinearConfig, LinearOptions
from ranks import in_two_processes
from untrained_runs import CONFIG, make_run

pytestmark = pytest.mark.slow

SHAPES = ["--data.name", "shapes", "--data.num-images", "240"]


@pytest.fixture
def run(tmp_path) -> Run:
    return make_run(tmp_path / "run")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Thirty pictures in three class folders, each class with its own colour."""
    generator = np.random.default_rng(0)
    for index in range(30):
        pixels = generator.integers(0, 120, (40, 48, 3), dtype=np.uint8)
        pixels[..., index % 3] += 100
        file = tmp_path / "images" / "abc"[index % 3] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    return tmp_path / "images"


def command(capfd, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in arguments])
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return done.value.code or 0, shown.out + shown.err


def result(run: Run, name: str) -> dict:
    return json.loads((run.results / f"{name}.json").read_text())


def test_a_moved_imagenet_is_judged_by_the_runs_own_classes(tmp_path):
    root = tmp_path / "imagenet"
    for synset in [*SYNSETS, "n00000001"]:
        (root / "train" / synset).mkdir(parents=True)
    data = dataclasses.replace(CONFIG.data, name="imagenet100", root="/gone", num_images=9)
    run = make_run(tmp_path / "run", dataclasses.replace(CONFIG, data=data))
    found = data_of_run(scan([str(run.path), "--data.root", str(root)]))
    assert (found.name, found.num_images) == ("imagenet100", None)
    (tmp_path / "photos").mkdir()
    assert data_of_run(scan([str(run.path), "--data.root", str(tmp_path / "photos")])).name is None


def test_knn_with_its_floor(run, capfd):
    code, shown = command(capfd, "knn", run.path, "--k", "5", "--baseline", "pixels", "untrained")
    assert code == 0
    found = result(run, "knn")
    assert set(found["baselines"]) == {"pixels", "untrained"}
    assert set(found["by_k"]) == {"20", "200"}
    assert found["k"] == 5
    assert {"command", "versions", "run", "written", "seconds"} <= set(found)
    assert f"{found['top1']:.4f}" in shown
    assert "pixels" in shown


def test_knn_on_other_images_without_a_test_split(run, folder, capfd):
    code, shown = command(capfd, "knn", run.path, "--data.root", folder, "--k", "3")
    assert code == 0
    assert "held out" in shown
    assert result(run, "knn")["train"] == 24
    assert result(run, "knn")["top1"] == 1.0


def test_linear_caches_small_data_and_says_so(run, capfd):
    code, shown = command(capfd, "linear", run.path, "--seeds", "2")
    assert code == 0
    assert "not the paper's protocol" in shown
    found = result(run, "linear-cached")
    assert found["seeds"] == 2
    assert found["top1_std"] >= 0
    assert found["penalty_chosen_by"] == "cross-validation"
    accuracies = {float(key): value for key, value in found["cross_validation"].items()}
    assert found["penalty"] == max(accuracies, key=lambda each: accuracies[each])
    assert f"Penalty {found['penalty']:g}" in shown


def test_a_penalty_that_is_given_is_used_and_recorded(run, capfd):
    code, shown = command(capfd, "linear", run.path, "--cached", "--penalty", "0.5")
    assert code == 0
    found = result(run, "linear-cached")
    assert (found["penalty"], found["penalty_chosen_by"]) == (0.5, "the user")
    assert "penalty 0.5" in shown
    code, shown = command(capfd, "linear", run.path, "--cached", "--penalty", "-1")
    assert code == 2
    assert "linear.penalty=-1.0 must be at least 0" in shown


def test_linear_protocol_changes_its_rate_at_the_right_epochs_and_no_trunk(run, capfd):
    before = run.encoder_file.read_bytes()
    code, _ = command(
        capfd,
        *("linear", run.path, "--preset", "imagenet100", "--epochs", "5"),
        *("--milestones", "2", "4", "--batch-size", "48", "--lr", "1.0"),
    )
    assert code == 0
    found = result(run, "linear")
    assert [line["lr"] for line in found["curve"]] == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])
    assert found["trunk_unchanged"] is True
    assert found["top1"] == found["curve"][-1]["top1"]
    assert found["best_top1"] == max(line["top1"] for line in found["curve"])
    assert "lr 1.0" in found["protocol"]
    assert run.encoder_file.read_bytes() == before


def test_linear_trains_on_every_image_in_every_epoch(run, monkeypatch):
    sizes, losses = [], []

    def note(logits, labels, reduction):
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        sizes.append(len(labels))
        losses.append(float(loss.detach()) / len(labels))
        return loss

    monkeypatch.setattr(linear, "cross_entropy", note)
    options = LinearOptions(preset="imagenet100", epochs=2, batch_size=100, lr=0.1, milestones=())
    found = linear.measure(run.path, options)
    assert sizes == [100, 100, 40] * 2  # official MoCo's loader drops none either
    mean = sum(size * loss for size, loss in zip(sizes[3:], losses[3:], strict=True)) / 240
    assert found["curve"][1]["loss"] == pytest.approx(mean)


def test_linear_checks_its_batches_before_it_extracts_anything(run, monkeypatch):
    monkeypatch.setattr(EvaluatedRun, "features", None)
    with pytest.raises(InputError, match=r"linear\.batch_size=300 exceeds the 240 training images"):
        linear.measure(run.path, LinearOptions(preset="imagenet100", batch_size=300))


def test_linear_notices_a_trunk_that_changes(run, monkeypatch):
    def spoil(evaluated, config, test, _):
        next(evaluated.encoder.parameters()).data.add_(1e-7)
        return SimpleNamespace(curve=[{"epoch": 0, "top1": 0.0, "top5": 0.0}])

    monkeypatch.setattr(linear, "train_classifier", spoil)
    with pytest.raises(AssertionError, match="trunk changed"):
        linear.measure(run.path, LinearOptions(preset="imagenet100"))


def test_presets_are_the_papers():
    first, second = LINEAR_PRESETS["imagenet100"], LINEAR_PRESETS["imagenet1k"]
    assert (first.epochs, first.lr, first.batch_size) == (60, 10.0, 128)
    assert first.milestones == (30, 40, 50)
    assert (second.epochs, second.lr, second.batch_size) == (100, 30.0, 512)
    assert second.milestones == (60, 80)
    assert LINEAR_PRESETS["official-moco"].batch_size == 256


LINEAR = LinearConfig(epochs=4, batch_size=48, lr=1.0, milestones=(3,))
"""240 images: the last batch is whole."""


def trained_classifier(path, config=LINEAR, stop=None):
    """Train one, or stop it after an epoch."""
    evaluated = open_evaluated_run(path)
    test = evaluated.features(evaluated.encoder, evaluated.test, "test")
    with pytest.MonkeyPatch.context() as patched:
        if stop is not None:
            save = linear.save

            def killed(training):
                save(training)
                if len(training.curve) == stop:
                    raise KeyboardInterrupt

            patched.setattr(linear, "save", killed)
        return linear.train_classifier(evaluated, config, test, "trunk")


def test_a_classifier_trained_by_the_protocol_learns_and_resumes_to_the_same_bits(run, capfd):
    whole = trained_classifier(run.path)
    assert whole.curve[-1]["loss"] < whole.curve[0]["loss"]
    linear.forget_epochs(whole)
    assert not (run.path / "linear").exists()
    with pytest.raises(KeyboardInterrupt):
        trained_classifier(run.path, stop=2)
    capfd.readouterr()
    resumed = trained_classifier(run.path)
    assert "Resuming the classifier after epoch 2" in capfd.readouterr().out
    assert resumed.curve == whole.curve
    assert torch.equal(resumed.classifier.weight, whole.classifier.weight)
    # Other settings resume nothing.
    other = trained_classifier(run.path, replace(LINEAR, lr=0.5))
    assert other.folder.path != resumed.folder.path


class _Classifier:
    """Both processes train one classifier; of the last batch of 24, rank 1 has nothing."""

    def __init__(self, path, out):
        self.path, self.out = str(path), str(out)

    def __call__(self, number):
        training = trained_classifier(self.path, replace(LINEAR, batch_size=72))
        torch.save((training.curve, training.classifier.state_dict()), f"{self.out}/{number}.pt")


def test_two_processes_train_the_classifier_of_one(run, tmp_path):
    in_two_processes(_Classifier(run.path, tmp_path))
    (curve, weights), (_, others) = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    shutil.rmtree(run.path / "linear")
    alone = trained_classifier(run.path, replace(LINEAR, batch_size=72))
    for name, tensor in alone.classifier.state_dict().items():
        assert torch.equal(weights[name], others[name])
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)
    for one, two in zip(alone.curve, curve, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)


@pytest.mark.parametrize("untrained", [False, True])
def test_finetune_on_a_share_of_the_labels(run, untrained, capfd):
    more = ["--untrained"] if untrained else []
    code, _ = command(
        capfd, "finetune", run.path, "--labels", "0.2", "--epochs", "2", "--batch-size", "16", *more
    )
    assert code == 0
    name = "finetune-0.2-untrained" if untrained else "finetune-0.2"
    assert result(run, name)["images"] == 48
    assert 0 <= result(run, name)["top1"] <= 1


def test_finetuning_learns(run):
    config = finetune.FinetuneConfig(epochs=12, batch_size=48, lr=0.1, classifier_lr=0.1)
    evaluated = open_evaluated_run(run.path)
    model = finetune.train(evaluated, build_backbone("small").trunk, config)
    seen = evaluated._replace(test=evaluated.train)
    assert finetune.score(seen, model).top1 > 0.3  # 12 classes; chance is 0.08


def test_subsets_are_balanced_and_chosen_by_the_seed():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    chosen = balanced_subset(labels, 0.3, 3, seed=0)
    assert torch.bincount(labels[chosen]).tolist() == [10, 10, 10]
    assert torch.equal(chosen, balanced_subset(labels, 0.3, 3, seed=0))
    assert not torch.equal(chosen, balanced_subset(labels, 0.3, 3, seed=1))
    assert torch.bincount(labels[balanced_subset(labels, 0.001, 3, 0)]).tolist() == [1, 1, 1]
    assert len(balanced_subset(labels, 1.0, 3, 0)) == 100
    with pytest.raises(InputError, match="class 2 has 20"):
        balanced_subset(labels, 0.9, 3, 0)


@pytest.mark.parametrize("ending", ["safetensors", "npy", "csv"])
def test_features_of_a_folder_with_the_names_beside_them(run, folder, ending, tmp_path, capfd):
    out = tmp_path / "new" / f"features.{ending}"
    code, _ = command(capfd, "features", run.path, "--data.root", folder, "--out", out)
    assert code == 0
    if ending == "csv":
        rows = list(csv.reader(out.open()))[1:]
        names, values = [row[0] for row in rows], np.array([row[3:] for row in rows], float)
    else:
        names = out.with_suffix(".names.txt").read_text().splitlines()
        values = np.load(out) if ending == "npy" else load_file(out)["features"].numpy()
    assert len(names) == len(values) == 30
    encoder = hardmix.load_encoder(run.path)
    with torch.no_grad():
        first = encoder(encoder.preprocess(names[7])[None])[0].numpy()
    np.testing.assert_allclose(values[7], first, atol=1e-5)


def test_files_read_by_an_encoder_have_the_features_of_the_command(tmp_path):
    """data.reduce shrinks photographs while they are read, to other pixels."""
    config = replace(CONFIG, data=replace(CONFIG.data, reduce=True))
    run = make_run(tmp_path / "run", config)
    (tmp_path / "photos").mkdir()
    noise = torch.randint(0, 256, (4, 300, 400, 3), dtype=torch.uint8).numpy()
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.{('jpg', 'png')[number % 2]}")
    data = replace(config.data, name="folder", root=str(tmp_path / "photos"), num_images=None)
    features, images = features_of(run.path, data)
    for encoder in (hardmix.load_encoder(run.path), hardmix.load_encoder(run.encoder_file)):
        files = [encoder.preprocess(file) for file in images.files]
        decoded = [encoder.preprocess(Image.open(file)) for file in images.files]
        with torch.no_grad():
            torch.testing.assert_close(encoder(torch.stack(files)), features.features)
        torch.testing.assert_close(decoded[1], files[1])  # a PNG has no smaller size to decode to


def test_an_encoder_carries_gradients_to_images_and_weights_where_they_are_asked_for(tmp_path):
    encoder = hardmix.load_encoder(make_run(tmp_path / "run").path)
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    encoder(images).sum().backward()
    assert images.grad is not None
    assert float(images.grad.abs().sum()) > 0
    assert all(weight.grad is not None for weight in encoder.parameters())
    with torch.no_grad():
        assert not encoder(images).requires_grad


def test_a_name_with_a_line_break_is_one_line_of_the_listing(run, folder, tmp_path, capfd):
    (folder / "b" / "4.png").rename(folder / "b" / "4\n5.png")
    code, _ = command(
        capfd, "features", run.path, "--data.root", folder, "--out", tmp_path / "f.npy"
    )
    names = (tmp_path / "f.names.txt").read_text().splitlines()
    assert code == 0
    assert len(names) == len(np.load(tmp_path / "f.npy"))
    assert str(folder / "b" / r"4\n5.png") in names


def test_neighbours_are_drawn_nearest_first(run, folder, tmp_path, capfd):
    image = folder / "b" / "4.png"
    where = ["--data.root", folder, "--out", tmp_path / "sheet.png", "--number", "8"]
    code, shown = command(capfd, "neighbours", run.path, image, *where)
    assert code == 0
    lines = [line.split() for line in shown.splitlines() if line[:2] in ("0.", "1.")]
    assert lines[0][1] == str(image)
    assert float(lines[0][0]) == pytest.approx(1.0, abs=1e-3)
    similarities = [float(line[0]) for line in lines]
    assert similarities == sorted(similarities, reverse=True)
    assert len(lines) == 8
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > sheet.height > 128


def test_an_encoder_is_ready_for_anybodys_code(run):
    encoder = hardmix.load_encoder(run.path)
    assert not encoder.training
    picture = Image.new("RGB", (60, 50), "red")
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
    assert torch.equal(encoder.preprocess(picture), encoder.preprocess(tensor))
    with torch.no_grad():
        assert encoder(encoder.preprocess(picture)[None]).shape == (1, 256)
    again = hardmix.load_encoder(run.encoder_file)
    assert torch.equal(again.trunk.conv1.weight, encoder.trunk.conv1.weight)


def test_an_own_trunk_is_asked_for(tmp_path):
    trunk = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 7))
    run = Run.create(tmp_path / "run", CONFIG)
    run.write_encoder(trunk, CONFIG, OWN_TRUNK)
    with pytest.raises(InputError, match="pass it as trunk="):
        hardmix.load_encoder(run.path)
    loaded = hardmix.load_encoder(run.path, trunk=torch.nn.Sequential(*trunk))
    assert loaded(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def spoil_missing(weights):
    del weights["conv1.weight"]


def spoil_extra(weights):
    weights["surplus"] = torch.zeros(1)


def spoil_shape(weights):
    weights["conv1.weight"] = torch.zeros(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_missing, "1 tensors are missing .conv1.weight"),
        (spoil_extra, "1 tensors are unknown .surplus"),
        (spoil_shape, "1 tensors differ in shape .conv1.weight"),
    ],
)
def test_an_encoder_file_with_other_tensors_is_refused(spoil, words, run, tmp_path):
    weights = load_file(run.encoder_file)
    spoil(weights)
    facts = {"backbone": "small", "channels": "3", "image_size": "32"}
    save_file(weights, tmp_path / "e.safetensors", {**facts, "format": "hardmix-encoder-1"})
    with pytest.raises(InputError, match=words):
        hardmix.load_encoder(tmp_path / "e.safetensors")


def test_bad_input_is_one_message_and_status_2(run, folder, tmp_path, capfd):
    (tmp_path / "flat").mkdir()
    for index in range(4):
        Image.new("RGB", (40, 40), (index, 0, 0)).save(tmp_path / "flat" / f"{index}.png")
    unfinished = Run.create(tmp_path / "unfinished", CONFIG).path
    broken = make_run(tmp_path / "broken")
    broken.encoder_file.write_bytes(broken.encoder_file.read_bytes()[:1000])
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(2)}, foreign)
    (tmp_path / "there.npy").write_text("")
    flat = ["--data.root", tmp_path / "flat"]
    cases = [
        (["knn", run.path, *flat], ["no labels", "folders named by class"]),
        (["linear", run.path, *flat], ["no labels"]),
        (["finetune", run.path, *flat], ["no labels"]),
        (["knn", unfinished], ["still training", "--resume"]),
        (["knn", broken.path], ["not an intact safetensors file", "encoder.safetensors"]),
        (["knn", run.path, "--k", "0"], ["k=0"]),
        (["linear", run.path, "--seeds", "0"], ["linear.seeds=0"]),
        (["linear", run.path, "--epochs", "0"], ["linear.epochs=0"]),
        (["linear", run.path, "--batch-size", "999"], ["linear.batch_size=999", "240"]),
        (["finetune", run.path, "--labels", "2"], ["finetune.labels=2"]),
        (["knn", run.path, "--data.channels", "4"], ["4"]),
        (["features", run.path, "--out", tmp_path / "f.txt"], [".csv"]),
        (["features", run.path, "--out", tmp_path / "there.npy"], ["already exists"]),
        (["neighbours", run.path, tmp_path / "no.png"], ["no.png"]),
        (["neighbours", run.path, folder / "a" / "0.png", "--number", "0"], ["number=0"]),
        (["knn"], ["RUN"]),
    ]
    for arguments, words in cases:
        code, shown = command(capfd, *arguments)
        assert code == 2, arguments
        assert all(word in shown for word in words), (arguments, shown)
    with pytest.raises(InputError, match="hardmix import"):
        hardmix.load_encoder(foreign)


def test_an_encoder_leaves_and_comes_back(run, tmp_path, capfd):
    file = tmp_path / "weights.safetensors"
    code, _ = command(capfd, "export", run.path, "--format", "safetensors", "--out", file)
    assert code == 0
    code, shown = command(capfd, "import", file, "--out", tmp_path / "again")
    assert code == 0
    assert "small" in shown
    code, _ = command(capfd, "knn", tmp_path / "again", *SHAPES, "--k", "5")
    assert code == 0
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        ours, theirs = (hardmix.load_encoder(path)(images) for path in (run.path, file))
    assert torch.equal(ours, theirs)
    assert command(capfd, "export", run.path, "--format", "onxx", "--out", file)[0] == 2
    assert command(capfd, "import", tmp_path / "no.pth", "--out", tmp_path / "x")[0] == 2


def test_training_and_test_images_must_have_the_same_two_classes_or_more(run):
    images = open_evaluated_run(run.path).train
    fewer = dataclasses.replace(images, classes=("a",))
    with pytest.raises(InputError, match="12 classes and shapes has 1: training and test"):
        _num_classes(images, fewer)
    with pytest.raises(InputError, match="1 class: accuracy needs at least two"):
        _num_classes(fewer, fewer)

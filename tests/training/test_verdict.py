"""The verdict: the right numbers, honest words, and the better of two encoders is kept."""

import dataclasses
import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import ranks
from hardmix.data.image_set import ImageSet
from hardmix.evaluation.baselines import ColourHistogram, ReducedPixels
from hardmix.evaluation.knn import KnnImages
from hardmix.runs.folder import Run
from hardmix.settings.recipes import demo
from hardmix.training import verdict as verdicts
from hardmix.training.pretrain import pretrain
from hardmix.training.verdict import (
    Scores,
    advise,
    choose_images,
    compare,
    near_copies,
    plain_vote,
    shared_neighbours,
    tell,
    without,
)

pytestmark = pytest.mark.slow


def read(run):
    return json.loads((run.results / "verdict.json").read_text())


def test_a_histogram_counts_colours():
    pixels = torch.zeros(1, 3, 4, 4)
    pixels[:, 0, :2] = 1.0  # the upper half is red, the lower one black
    mean, std = (torch.tensor(each)[:, None, None] for each in verdict_statistics())
    found = ColourHistogram()((pixels - mean) / std)[0]
    assert found.shape == (512,)
    assert found[7 * 64].item() == pytest.approx(0.5**0.5)
    assert found[0].item() == pytest.approx(0.5**0.5)
    assert found.norm().item() == pytest.approx(1)
    assert ColourHistogram()(torch.zeros(2, 5, 8, 8)).shape == (2, 5 * 64)


def verdict_statistics():
    return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_pixels_of_large_images_are_reduced():
    assert ReducedPixels()(torch.zeros(2, 3, 96, 96)).shape == (2, 3 * 32 * 32)
    small = torch.rand(2, 3, 8, 8)
    assert torch.equal(ReducedPixels()(small), small.flatten(1))


def test_shared_neighbours_are_those_in_both_lists():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(30, 5, generator=generator) for _ in range(2))
    found = shared_neighbours(first, second, 4)
    for row in range(30):
        lists = []
        for features in (first, second):
            near = torch.cosine_similarity(features[row : row + 1], features)
            near[row] = -2
            lists.append(set(near.topk(4).indices.tolist()))
        assert float(found[row]) == pytest.approx(len(lists[0] & lists[1]) / 4)
    assert float(shared_neighbours(first, first, 4).min()) == 1.0


def scores_of(**rates):
    """Return scores of encoders, each right at this rate, on images of its own."""
    generator = torch.Generator().manual_seed(0)
    each = {
        name: (torch.randperm(400, generator=generator) < rate * 400).float()
        for name, rate in rates.items()
    }
    return Scores(each, 20, 400, 0.1)


def test_better_worse_and_within_the_noise():
    found = compare(scores_of(encoder=0.5, untrained=0.3, pixels=0.48, colours=0.7))
    assert (found["untrained"].better, found["untrained"].worse) == (True, False)
    assert (found["pixels"].better, found["pixels"].worse) == (False, False)
    assert (found["colours"].better, found["colours"].worse) == (False, True)
    assert found["pixels"].difference == pytest.approx(0.02)
    spread = (0.5 * 0.5 + 0.3 * 0.7) ** 0.5 / 20  # of independent images
    assert found["untrained"].error == pytest.approx(spread, rel=0.2)


def test_the_sentence_says_what_is_beaten_and_what_is_not():
    scores = scores_of(encoder=0.5, untrained=0.3, pixels=0.48, colours=0.7)
    text = tell(scores, compare(scores), classes="81 folders", keep="encoder")
    assert text.startswith(
        "The encoder is worse than a colour histogram and not clearly better than raw pixels: the"
        " nearest neighbour and the vote of the 20 nearest give the right one of 81 folders for"
        " 50.0% ± 5.0% of 400 images; a colour histogram 70.0%, raw pixels 48.0%, the untrained"
        " network 30.0%."
    )
    scores = scores_of(encoder=0.9, untrained=0.3, pixels=0.2, colours=0.4)
    text = tell(scores, compare(scores), classes="2 classes", keep="encoder")
    assert text.startswith(
        "The encoder is better than the simple baselines; it was not compared with pre-trained"
    )
    scores.each["start"] = scores.each["pixels"]
    text = tell(scores, compare(scores), classes="2 classes", keep="encoder")
    assert text.startswith("The encoder is better than everything it was compared with: the")


def test_without_labels_an_encoder_can_fail_but_not_pass():
    ahead = scores_of(encoder=0.9, untrained=0.3, pixels=0.2, colours=0.4)
    text = tell(ahead, compare(ahead), classes="", keep="encoder")
    assert text.startswith("Without labels nobody can tell how good the encoder is")
    behind = scores_of(encoder=0.3, untrained=0.3, pixels=0.2, colours=0.9)
    text = tell(behind, compare(behind), classes="", keep="encoder")
    assert text.startswith("The encoder is worse than a colour histogram and not clearly better")


def test_advice_names_the_likeliest_cure_first(tmp_path):
    config, run = demo(), Run(tmp_path / "a b")
    behind = compare(scores_of(encoder=0.5, untrained=0.3, pixels=0.3, colours=0.7))
    weights, queue, colours, longer = advise(config, behind, 2662, run)
    assert "--train.queue-size 532" in queue
    assert "--data.colour-strength 0.5" in colours
    assert "--model.init" in weights
    assert "'" in longer
    assert longer.endswith("--resume --train.epochs 32")
    ahead = compare(scores_of(encoder=0.5, untrained=0.6, pixels=0.3, colours=0.2))
    (longer,) = advise(config, ahead, 100_000, run)
    assert "train longer" in longer
    most = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=400))
    assert not [line for line in advise(most, ahead, 2662, run) if "train longer" in line]


def test_the_finest_folders_are_the_classes(tmp_path):
    names = [f"{tmp_path}/{top}/{leaf}/{i}.png" for top in "ab" for leaf in "cd" for i in range(9)]
    names += [f"{tmp_path}/a/rare/0.png"]
    top = torch.tensor([name.startswith(f"{tmp_path}/b") for name in names]).long()
    images = ImageSet("set", top, ("a", "b"), files=tuple(names))
    chosen = choose_images(images, KnnImages(images, None), 5000, 0, finest=True)
    assert chosen.classes == "4 folders"
    assert chosen.bank.classes == ("a/c", "a/d", "b/c", "b/d")
    assert len(chosen.bank) == 36
    assert torch.equal(chosen.bank.labels, torch.arange(4).repeat_interleave(9))
    assert choose_images(images, KnnImages(images, None), 5000, 0).classes == "2 classes"
    unlabelled = dataclasses.replace(images, labels=None, classes=None)
    assert choose_images(unlabelled, None, 5000, 0, finest=True).classes == "4 folders"


def test_test_images_have_the_folders_of_the_training_images(tmp_path):
    train = ImageSet(
        "s", None, None, files=tuple(f"{tmp_path}/train/{i % 3}/x/{i}.png" for i in range(30))
    )
    test = ImageSet(
        "s", None, None, files=tuple(f"{tmp_path}/test/{i % 4}/x/{i}.png" for i in range(8))
    )
    test = dataclasses.replace(test, labels=torch.zeros(8, dtype=torch.long), classes=("0",))
    chosen = choose_images(train, KnnImages(train, test), 5000, 0, finest=True)
    assert chosen.test.labels.tolist() == [0, 1, 2, 0, 1, 2]  # folder 3 has no training images


def test_near_copies_do_not_vote():
    torch.manual_seed(0)
    bank = torch.randn(30, 48)
    bank[1] = bank[0] + 0.05 * torch.randn(48)
    copies = near_copies(bank, bank, leave_one_out=True)
    assert copies[0, 0] == 1
    assert copies[1, 0] == 0
    assert (copies[2:] == -1).all()
    places = torch.tensor([[1, 5, 7, 9], [0, 5, 7, 9], [1, 5, 7, 9]])
    assert without(places, copies[:3], 3).tolist() == [[5, 7, 9], [5, 7, 9], [1, 5, 7]]


def test_the_plain_vote_counts_and_ties_go_to_the_nearer():
    labels = torch.tensor([[3, 1, 1, 3, 2], [2, 1, 1, 0, 0], [5, 5, 4, 4, 4]])
    assert plain_vote(labels).tolist() == [3, 1, 4]


def labelled(number, classes):
    labels = torch.arange(number) % classes
    images = torch.zeros(number, 3, 4, 4, dtype=torch.uint8)
    return ImageSet("set", labels, tuple(map(str, range(classes))), tensor=images)


def test_labels_count_if_neighbours_can_share_them():
    few, own = labelled(40, 4), labelled(40, 40)
    assert choose_images(few, KnnImages(few, None), 5000, 0).labelled
    assert not choose_images(own, KnnImages(own, None), 5000, 0).labelled
    assert not choose_images(few, None, 5000, 0).labelled
    both = choose_images(few, KnnImages(few, labelled(40, 4)), 30, 0)
    assert (len(both.bank), len(both.test)) == (24, 6)


@pytest.mark.parametrize("method", ["moco-v2", "mochi", "supervised"])
def test_every_method_ends_with_a_verdict(method, tmp_path, capfd):
    run = pretrain(ranks.tiny(method), tmp_path / "run")
    found = read(run)
    assert found["scores"].keys() == {"encoder", "untrained", "pixels", "colours"}
    assert found["differences"].keys() == {"untrained", "pixels", "colours"}
    assert (found["measure"], found["kept"], found["images"]) == ("knn", "encoder", 96)
    assert bool(found["next"]) != found["better"]
    assert found["classes"].endswith("classes")
    parts = found["scores"]["encoder"]
    assert parts["score"] == pytest.approx((parts["nearest"] + parts["vote"]) / 2)
    assert found["text"] in capfd.readouterr().out


def test_it_can_be_turned_off(tmp_path):
    run = pretrain(ranks.tiny(train={"epochs": 1, "verdict": False}), tmp_path / "run")
    assert not (run.results / "verdict.json").exists()


def test_two_processes_reach_the_same_verdict(tmp_path):
    ranks.all_ranks(pretrain, ranks.tiny(train={"epochs": 1}), tmp_path / "run")
    assert read(Run(tmp_path / "run"))["images"] == 96


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory):
    generator, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("images")
    for number in range(48):
        pixels = torch.randint(0, 255, (40, 40, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return folder


def test_without_labels_two_views_are_compared_and_a_resume_repeats_it(unlabelled, tmp_path):
    data = {"name": None, "root": str(unlabelled), "num_images": None, "workers": 0}
    config = ranks.tiny(data=data, train={"queue_size": 16, "epochs": 1})
    run = pretrain(config, tmp_path / "run")
    first = read(run)
    assert (first["measure"], first["images"], first["k"]) == ("views", 48, 4)
    assert first["chance"] == pytest.approx(4 / 47)
    again = read(pretrain(config, tmp_path / "run", resume=True))
    assert again["scores"] == first["scores"]


def test_the_weights_it_started_from_are_kept_if_training_made_them_worse(tmp_path, monkeypatch):
    start = pretrain(ranks.tiny(train={"epochs": 1}), tmp_path / "start")
    config = ranks.tiny(model={"init": str(start.path)}, train={"epochs": 1})
    run = pretrain(config, tmp_path / "kept")
    assert read(run)["scores"].keys() == {"encoder", "start", "untrained", "pixels", "colours"}
    kept = read(run)["kept"]
    trained = load_file(run.trained_file if kept == "start" else run.encoder_file)

    def worse(scores):
        found = compare(scores)
        return found | {"start": found["start"]._replace(better=False, worse=True)}

    monkeypatch.setattr(verdicts, "compare", worse)
    (run.path / "results" / "verdict.json").unlink()
    run = pretrain(config, run.path, resume=True)  # nothing is left to train
    found = read(run)
    assert found["kept"] == "start"
    assert "encoder-trained.safetensors the trained ones" in found["text"]
    assert not found["better"]
    ours, theirs = load_file(run.encoder_file), load_file(start.encoder_file)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    aside = load_file(run.trained_file)
    assert all(torch.equal(aside[name], trained[name]) for name in trained)
    monkeypatch.undo()
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2))
    run = pretrain(longer, run.path, resume=True)
    if read(run)["kept"] == "encoder":
        assert not run.trained_file.exists()


def test_ones_own_network_is_compared_with_itself_before_training(tmp_path):
    run = pretrain(
        ranks.tiny(train={"epochs": 1}), tmp_path / "run", trunk=ranks.group_norm_trunk()
    )
    assert read(run)["scores"].keys() == {"encoder", "start", "pixels", "colours"}


def test_a_large_network_is_judged_on_fewer_images():
    few = torch.nn.Sequential(torch.nn.Conv2d(3, 256, 9), torch.nn.Flatten())
    config = dataclasses.replace(demo().data, image_size=224)
    number = verdicts.sample_size({"encoder": few, "pixels": few}, config)
    assert verdicts.FEWEST <= number < verdicts.MOST
    small = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.Flatten())
    assert verdicts.sample_size({"encoder": small}, config) == verdicts.MOST

"""Two real processes (gloo) do what one does: the same queue, loss and weights."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import hardmix.training.pretrain as loop
from hardmix.commands import main as cli, processes
from hardmix.data.loading import ViewLoader
from hardmix.data.sources import open_images
from hardmix.errors import InputError
from hardmix.evaluation.features import extract
from hardmix.methods import clusters, moco
from hardmix.methods.base import Method
from hardmix.methods.mixing_schedule import RowsGenerator
from hardmix.mixing.plans import mix, ranked
from hardmix.mixing.random_draws import uniform_numbers
from hardmix.runtime import distributed, rendezvous
from hardmix.runtime.device import choose_compute
from hardmix.runtime.distributed import gather_uneven, world_size
from hardmix.runtime.launch import Launch, first_host, launched
from hardmix.settings.config import DataConfig
from hardmix.training import setup
from hardmix.training.pretrain import pretrain
from ranks import (
    all_ranks,
    group_norm_trunk,
    lines_of,
    manifest_of,
    signal_after,
    start,
    state_of,
    tiny,
    wait,
)

pytestmark = pytest.mark.slow


def train_alone_encoder(config, out):
    pretrain(config, out, trunk=group_norm_trunk())


def newest(run):
    return load_file(sorted((run / "checkpoints").glob("*.safetensors"))[-1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_train_as_one_does(accumulate, tmp_path):
    """Group norm encodes each image alone, so that only rounding is left."""
    train = {"accumulate": accumulate, "precision": "fp32"}
    config = tiny(train=train, model={"key_bn_splits": 2})
    for ranks in (1, 2):
        all_ranks(train_alone_encoder, config, tmp_path / str(ranks), ranks=ranks)
    one, two = newest(tmp_path / "1"), newest(tmp_path / "2")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-4)
    for name in ("ids", "labels", "_extra_state"):
        assert torch.equal(one[f"objective.memory.{name}"], two[f"objective.memory.{name}"])
    for alone, both in zip(lines_of(tmp_path / "1"), lines_of(tmp_path / "2"), strict=True):
        assert alone == pytest.approx(both, abs=1e-4)


def shuffle_within_nodes(config, out, processes_of_a_node):
    """Train where every few processes are a node, and note what would go from node to node."""
    this = torch.distributed.get_rank() // processes_of_a_node if world_size() > 1 else 0
    distributed.socket.gethostname = lambda: f"host-{this}"
    send = torch.distributed.all_to_all_single
    across = []

    def noted(received, sent, sizes, own_sizes, **options):
        there = [rank for rank, size in enumerate(sizes) if size]
        across.extend(rank for rank in there if rank // processes_of_a_node != this)
        return send(received, sent, sizes, own_sizes, **options)

    torch.distributed.all_to_all_single = noted
    pretrain(config, out, trunk=group_norm_trunk())
    assert across == []


def test_four_processes_on_two_nodes_train_as_one_does_and_shuffle_within_nodes(tmp_path):
    model = {"key_bn_splits": 4, "key_shuffle": "node"}
    config = tiny(train={"precision": "fp32", "knn_every": 0, "epochs": 1}, model=model)
    for ranks in (1, 4):
        all_ranks(shuffle_within_nodes, config, tmp_path / str(ranks), 2, ranks=ranks)
    one, four = newest(tmp_path / "1"), newest(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=0, atol=1e-4)


def test_a_process_alone_on_its_node_cannot_shuffle_there(tmp_path):
    config = tiny(model={"key_bn_splits": 2, "key_shuffle": "node"})
    options = shuffle_within_nodes, config, tmp_path / "run", 1
    assert wait(start(*options, output=tmp_path / "log")) == [2, 2]
    words = "model.key_shuffle=node, but rank 0 is the only process of its node"
    assert words in (tmp_path / "log-0").read_text()


@pytest.mark.parametrize("method", ["mochi", "supervised"])
def test_the_same_number_of_processes_gives_the_same_bits(method, tmp_path):
    for name in ("a", "b"):
        all_ranks(pretrain, tiny(method), tmp_path / name)
    assert state_of(tmp_path / "a") == state_of(tmp_path / "b")


def stop_rank_1_with_requests_read_late(config, out, resume):
    """Read a step's requests while the next one is computed, as on GPUs."""
    setup.judged_late = lambda _: True
    if torch.distributed.get_rank() == 1 and not resume:
        with pytest.MonkeyPatch.context() as patches:
            signal_after(patches, {5})
            pretrain(config, out)
        return
    pretrain(config, out, resume=resume)


def test_requests_that_are_read_a_step_late_stop_all_ranks_at_the_same_step(tmp_path):
    config = tiny(train={"log_every": 100, "knn_every": 0})
    all_ranks(pretrain, config, tmp_path / "whole")
    options = stop_rank_1_with_requests_read_late, config, tmp_path / "stopped"
    assert wait(start(*options, False)) == [75, 75]
    assert manifest_of(tmp_path / "stopped" / "checkpoints")["position"] in (5, 6, 0)
    all_ranks(*options, True)
    assert state_of(tmp_path / "whole") == state_of(tmp_path / "stopped")


def test_mixing_draws_the_same_on_any_number_of_processes():
    def drawn(rows, part):
        generator = RowsGenerator()
        generator.manual_seed(3)
        generator.part = part
        similarity = torch.arange(40.0).expand(rows, 40)
        plan = mix(ranked(similarity, 9), 5, 3, similarity, generator)
        more = uniform_numbers(similarity, 5, generator)
        return torch.cat([plan.base, plan.partner, plan.share, more], dim=1)

    parts = [drawn(2, part) for part in range(3)]
    assert torch.equal(torch.cat(parts), drawn(6, 0))
    assert not torch.equal(parts[0], parts[1])


def disturb_rank_1(config, out):
    from hardmix.training import state as training_state

    check = training_state.check_ranks_agree

    def disturbed(training):
        if torch.distributed.get_rank() == 1:
            training.method.memory.keys[3, 5] += 1e-6
        check(training)

    import hardmix.training.pretrain as loop

    loop.check_ranks_agree = disturbed
    pretrain(config, out)


def test_a_queue_that_differs_between_ranks_stops_all_and_is_not_saved(tmp_path):
    log = tmp_path / "log"
    assert wait(start(disturb_rank_1, tiny(), tmp_path / "run", output=log)) == [2, 2]
    assert "the queue's keys of rank 1 differ" in (tmp_path / "log-0").read_text()
    assert "differ" not in (tmp_path / "log-1").read_text()  # said once
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"batch_size": 15}, "model": {"key_bn_splits": 1}}, "15 is not divisible by"),
        ({"train": {"batch_size": 18}, "model": {"key_bn_splits": 3}}, "key_bn_splits=3"),
    ],
)
def test_what_two_processes_cannot_share_is_refused_once_by_name(settings, words, tmp_path):
    log = tmp_path / "log"
    assert wait(start(pretrain, tiny(**settings), tmp_path / "run", output=log)) == [2, 2]
    assert words in (tmp_path / "log-0").read_text()
    assert words not in (tmp_path / "log-1").read_text()
    assert not (tmp_path / "run").exists()


def write_features_of_uneven_sets(folder):
    for number in (1, 5, 7):
        data = DataConfig(name="folder", root=str(folder), image_size=8, workers=0)
        images = open_images(data).select(torch.arange(number))
        options = {"compute": choose_compute("cpu"), "batch_size": 2}
        found = extract(torch.nn.Flatten(), images, data, **options)
        assert found.ids.tolist() == list(range(number))
        assert found.features[:, 0].argsort().tolist() == list(range(number))
    rank = torch.distributed.get_rank()
    assert gather_uneven(torch.full((2 * rank, 3), rank)).shape == (2, 3)


def test_features_are_shared_out_and_every_image_comes_once(tmp_path):
    for number in range(7):
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(tmp_path / f"{number}.png")
    all_ranks(write_features_of_uneven_sets, tmp_path)


def fail_on_rank_1(out):
    if torch.distributed.get_rank() == 1:
        raise InputError("the disk of this node is gone")
    pretrain(tiny(), out)


def test_what_one_rank_says_reaches_the_user_with_its_rank(tmp_path):
    statuses = wait(start(fail_on_rank_1, tmp_path / "run", output=tmp_path / "log"))
    assert statuses == [2, 2]  # to resume would fail again
    assert "rank 1 stopped: the disk of this node is gone" in (tmp_path / "log-0").read_text()


def note_calls(module, name, file):
    """Have a function write a line to a file whenever it is called."""
    function = getattr(module, name)

    def noted(*arguments, **options):
        if torch.distributed.get_rank() == 0:
            with file.open("a") as out:
                out.write(f"{name}\n")
        return function(*arguments, **options)

    setattr(module, name, noted)


def fail_on_third_batch():
    """Rank 1 cannot read its third batch."""
    epoch = ViewLoader.epoch

    def broken(self, *arguments):
        for number, batch in enumerate(epoch(self, *arguments)):
            if number == 2 and torch.distributed.get_rank() == 1:
                raise InputError("no such file")
            yield batch

    ViewLoader.epoch = broken


def lose_a_disk(out, calls):
    note_calls(loop, "take_step", calls)
    fail_on_third_batch()
    pretrain(tiny(), out)


def lose_a_disk_while_filling_the_queue(out, calls):
    note_calls(moco, "encode_keys", calls)
    fail_on_third_batch()
    pretrain(tiny(train={"queue_start": "prefill"}), out)


def fail_before_clusters(out, calls):
    """Rank 1 fails between two epochs."""
    note_calls(clusters, "broadcast", calls)
    if torch.distributed.get_rank() == 1:
        clusters.embed_images = lack_a_folder
    pretrain(tiny(loss={"filter": "same-cluster", "clusters": 3}), out)


def lack_a_folder(*_):
    raise InputError("no such folder")


def lack_a_data_set(out, calls):
    """Rank 1 does not find the images."""
    note_calls(Method, "distribute", calls)
    config = tiny()
    if torch.distributed.get_rank() == 1:
        config = tiny(data={"name": "folder", "root": str(out / "nowhere")})
    pretrain(config, out)


@pytest.mark.parametrize(
    ("job", "calls"),
    [
        (lose_a_disk, 2),
        (lose_a_disk_while_filling_the_queue, 2),
        (fail_before_clusters, 0),
        (lack_a_data_set, 0),
    ],
)
def test_a_rank_that_fails_is_noticed_before_the_others_wait_on_gpus(job, calls, tmp_path):
    noted, log = tmp_path / "calls", tmp_path / "log"
    noted.touch()
    assert wait(start(job, tmp_path / "run", noted, output=log)) == [2, 2]
    assert len(noted.read_text().split()) == calls
    assert "rank 1 stopped: " in (tmp_path / "log-0").read_text()
    status = tmp_path / "run" / "status.json"
    if status.exists():
        assert json.loads(status.read_text())["state"] == "failed"


def test_a_rank_that_never_comes_is_named(tmp_path):
    processes = start(pretrain, tiny(), tmp_path / "run", timeout=2.0, output=tmp_path / "log")
    os.kill(processes[1].pid, signal.SIGSTOP)
    processes[0].join(60)
    os.kill(processes[1].pid, signal.SIGKILL)
    assert wait(processes) == [75, -signal.SIGKILL]
    assert re.search(
        r"rank 1 (of 2 did not connect|on \w+ has died)", (tmp_path / "log-0").read_text()
    )


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_which_names_it(victim, tmp_path):
    config = tiny(train={"epochs": 200, "knn_every": 0})
    processes = start(pretrain, config, tmp_path / "run", output=tmp_path / "log")
    until((tmp_path / "run" / "checkpoints" / "step-00000012.json").exists)
    processes[victim].kill()
    statuses = wait(processes, seconds=30)
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] == 75
    assert f"rank {victim} on" in (tmp_path / f"log-{1 - victim}").read_text()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    if victim == 1:  # else nobody is left who has the folder
        assert status["state"] == "stopped"
        assert "rank 1 on" in status["reason"]


def test_torchrun_starts_a_killed_rank_again_and_it_goes_on(tmp_path):
    run = tmp_path / "run"
    words = "--data.num-images 96 --train.batch-size 16 --train.queue-size 64 --mix.num-hardest 16"
    words += " --train.epochs 8 --train.knn-every 0 --train.device cpu --train.log-every 100"
    words += " --train.timeout 60 --resume auto"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "-m", "hardmix", "--", "pretrain", "demo"]
    command += ["--out", str(run), *words.split()]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until((run / "checkpoints" / "step-00000006.json").exists, seconds=100)
    os.kill(json.loads((run / "status.json").read_text())["process"], signal.SIGKILL)
    shown, _ = job.communicate(timeout=100)
    assert job.returncode == 0, shown
    assert "Resuming from step" in shown
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert [line["step"] for line in lines_of(run)] == list(range(6, 49, 6))


class Store(dict):
    """A store in place of the one that the processes of a job share."""

    def get(self, name):
        return self[name].encode()


def test_hosts_that_offer_a_loopback_address_are_named_before_gloo_fails(monkeypatch, capfd):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = Store({"here-0": "node1 10.0.0.1", "here-1": "node2 127.0.1.1"})
    two_nodes, one_node = Launch(0, 2, 0, 1, "node1", 5), Launch(0, 2, 0, 2, "node1", 5)
    rendezvous.check_addresses(store, one_node)
    assert capfd.readouterr().err == ""
    rendezvous.check_addresses(store, two_nodes)
    shown = capfd.readouterr().err
    assert "node2 resolves to a loopback address" in shown
    assert "GLOO_SOCKET_IFNAME" in shown
    error = RuntimeError("gloo: connect failed")
    monkeypatch.setattr(rendezvous, "_broken", False)  # `_lost` sets it: not for later tests
    monkeypatch.setattr(rendezvous, "_within", lambda *_: ([], {}, {}))
    assert "GLOO_SOCKET_IFNAME" in str(rendezvous._lost(store, two_nodes, 9.0, error))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    rendezvous.check_addresses(store, two_nodes)
    assert capfd.readouterr().err == ""


def assembled(store, *ranks, seconds=20.0):
    """Two processes that look for each other, or one of them."""

    def assemble(rank):
        return rendezvous._assemble(store, Launch(rank, 2, 0, 1, "node1", 5), seconds)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(assemble, ranks))


def test_processes_that_torchrun_starts_again_meet_whatever_their_hosts_have_counted():
    """Counts of restarts differ between hosts, as benchmarks/two_hosts.py found."""
    agent = torch.distributed.HashStore()
    for _ in range(3):
        (first, absent), (second, _) = assembled(agent, 0, 1)
        assert absent == []
        assert not first.check(["word"])  # of those before
        first.set("word", "")
        assert second.check(["word"])
        assert second.get("here-0") == first.get("here-0")
    ((_, absent),) = assembled(agent, 0, seconds=0.1)
    assert absent == [1]


def test_after_a_loss_a_process_exits_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for broken, status in ((False, 75), (True, 75), (True, None)):
        monkeypatch.setattr(rendezvous, "_broken", broken)
        with pytest.raises(SystemExit):
            processes.leave(status)
    assert ended == [75]


def test_more_processes_than_groups_of_keys_are_said_at_the_start(tmp_path):
    config = tiny(model={"key_bn_splits": 1}, train={"epochs": 1, "knn_every": 0})
    all_ranks(pretrain, config, tmp_path / "run", output=tmp_path / "log")
    words = "model.key_bn_splits=1 with 2 processes: .* there are 2 groups of 8 keys, not 1 of 16"
    shown = (tmp_path / "log-0").read_text()
    assert re.search(words, " ".join(shown.split()))


def test_more_processes_than_groups_of_keys_are_said_of_a_stream_too(monkeypatch, capfd):
    monkeypatch.setattr(setup, "world_size", lambda: 2)
    setup.check_data(tiny(model={"key_bn_splits": 1}), None)
    assert "model.key_bn_splits=1 with 2 processes" in " ".join(capfd.readouterr().err.split())


def test_the_variables_of_torchrun_and_of_slurm_say_who_is_who():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "a", "MASTER_PORT": "5"}
    torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_PROCID": "0"}
    assert launched(torchrun) == Launch(3, 4, 1, 2, "a", 5, True)
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    slurm |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    slurm |= {"SLURM_JOB_ID": "1234567"}
    assert launched(slurm) == Launch(5, 8, 1, 4, "gpu07", 24567)
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # a shell in a job
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(InputError, match="WORLD_SIZE is 'two'"):
        launched({"RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("a[3,5-7]", "a3"),
        ("a[01-02]-ib,b", "a01-ib"),
        ("", "localhost"),
    ],
)
def test_slurms_first_node(nodes, first):
    assert first_host(nodes) == first


def test_commands_that_many_processes_cannot_share_say_so_once(monkeypatch, capfd):
    assert set(cli.SHARED) <= set(cli.COMMANDS)
    for rank, words in (("0", "hardmix finetune runs in one process"), ("1", "")):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main(["finetune", "RUN"])
        assert ended.value.code == 2
        shown = capfd.readouterr().err
        assert words in shown
        assert bool(shown) == bool(words)

"""Measures what k-NN and the linear protocol cost each of 1, 2 and 4 processes.

    python benchmarks/evaluation_cost.py [--rows 32768] [--queries 4096] [--images 2048]

CPU seconds of every process, of which the highest is shown: they do not depend on what else runs
here. For k-NN also the memory: how much a process's peak is above what it used before and its own
features. Features are random, images drawn; processes meet over gloo, with one thread each. Linux.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path

WIDTH = 2048


def main() -> None:
    """Print a line for each number of processes."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=32768, help="training images of k-NN")
    options.add_argument("--queries", type=int, default=4096, help="test images of k-NN")
    options.add_argument("--images", type=int, default=2048, help="training images of linear")
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for many in given.processes:
        found = on_processes(many, nearest, given.rows, given.queries)
        seconds, features, more = (max(column) for column in zip(*found, strict=True))
        print(
            f"k-NN, {many} processes: {seconds:.1f} s, {features:.0f} MB of features,"
            f" {more:.0f} MB more",
            flush=True,
        )
    for many in given.processes:
        with tempfile.TemporaryDirectory() as folder:
            make_run(folder, given.images)
            found = on_processes(many, linear, folder)
        print(f"linear, {many} processes: {max(found):.1f} s", flush=True)


def nearest(many: int, number: int, rows: int, queries: int) -> tuple[float, float, float]:
    """CPU seconds, MB of features, and MB beyond them, of the k-NN vote."""
    import torch

    from hardmix.evaluation.knn import knn_accuracy
    from hardmix.runtime.device import forget_peak, peak_mb

    cpu = torch.device("cpu")
    torch.manual_seed(number)
    few = torch.randn(512, WIDTH), torch.arange(512) % 10
    knn_accuracy(*few, *few, shared=True)  # the libraries' own memory
    forget_peak(cpu)
    before = peak_mb(cpu) or 0.0
    parts = [torch.randn(each // many, WIDTH) for each in (rows, queries)]
    labels = [torch.arange(len(part)) % 1000 for part in parts]
    features = sum(part.nbytes for part in parts) / 2**20
    started = time.process_time()
    knn_accuracy(parts[0], labels[0], parts[1], labels[1], shared=True)
    seconds = time.process_time() - started
    return seconds, features, (peak_mb(cpu) or 0.0) - before - features


def linear(_many: int, _number: int, folder: str) -> float:
    """CPU seconds of two epochs of the classifier on crops, with its tests."""
    from hardmix.evaluation.evaluated_run import open_evaluated_run
    from hardmix.evaluation.linear import train_classifier
    from hardmix.settings.evaluations import LinearConfig

    evaluated = open_evaluated_run(Path(folder))
    started = time.process_time()
    test = evaluated.features(evaluated.encoder, evaluated.test, "test")
    train_classifier(evaluated, LinearConfig(epochs=2, batch_size=128, lr=1.0), test, folder)
    return time.process_time() - started


def make_run(folder: str, images: int) -> None:
    """Write a run with an untrained encoder."""
    from hardmix.models.backbones import build_backbone
    from hardmix.runs.folder import Run
    from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig

    data = DataConfig(name="shapes", num_images=images, image_size=64, blur=False, workers=0)
    model, train = ModelConfig(backbone="small"), TrainConfig(device="cpu")
    config = PretrainConfig(recipe="demo", data=data, model=model, train=train)
    run = Run.create(folder, config)
    run.write_encoder(build_backbone("small").trunk, config)


def on_processes(many: int, job, *arguments):
    """Run job(many, number, *arguments) on processes that can talk; returns what each returned."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    tasks = [(many, number, port, job, arguments) for number in range(many)]
    with context.Pool(many) as pool:
        return pool.starmap(joining, tasks, chunksize=1)


def joining(many: int, number: int, port: int, job, arguments):
    """Join the others, then do the job."""
    import torch

    from hardmix.runtime.launch import Launch
    from hardmix.runtime.rendezvous import joined

    torch.set_num_threads(1)
    launch = Launch(number, many, number, many, "localhost", port, 0) if many > 1 else None
    with joined(launch, "cpu", 600.0):
        return job(many, number, *arguments)


if __name__ == "__main__":
    main()

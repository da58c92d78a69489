"""Worker processes: kept between runs, deaf to signals, named when they die, gone at the end."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from hardmix.data import workers
from hardmix.data.workers import WorkerPool, dead_workers_named, empty_to_send
from hardmix.errors import InputError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def square(number):
    return number, number**2, os.getpid(), torch.get_num_threads()


def survive(signal_number):
    os.kill(os.getpid(), signal_number)
    return "alive"


def fall(_):
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds):
    time.sleep(seconds)


def fail(_):
    raise InputError("the file is broken")


def shared_numbers(value):
    numbers = empty_to_send((2, 3, 5))
    return numbers.fill_(value)


@pytest.fixture
def pool_of():
    pools = []

    def make(function, number=1):
        pools.append(WorkerPool(function, number, CPU))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_results_come_in_order(pool_of, number):
    pool = pool_of(square, number)
    assert [result[:2] for result in pool.run(list(range(9)))] == [(i, i**2) for i in range(9)]


def test_workers_live_on_and_use_one_thread(pool_of):
    pool = pool_of(square)
    first, second = (list(pool.run([1, 2, 3])) for _ in range(2))
    assert {result[2] for result in first} == {result[2] for result in second}
    assert os.getpid() not in {result[2] for result in first}
    assert {result[3] for result in first} == {1}


def test_a_run_may_be_left_early(pool_of):
    pool = pool_of(square, 2)
    assert next(pool.run(list(range(50))))[:2] == (0, 0)
    assert [result[0] for result in pool.run([7, 8])] == [7, 8]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_leave_signals_to_the_main_process(pool_of, number):
    assert list(pool_of(survive).run([number])) == ["alive"]


def test_a_killed_worker_is_named_with_a_way_out(pool_of):
    with pytest.raises(InputError, match=r"pid.* \d+.*data\.workers") as caught:
        list(pool_of(fall).run([0, 1]))
    assert "Killed" in str(caught.value) or "exited unexpectedly" in str(caught.value)


def test_a_stuck_worker_is_given_up_and_ended(pool_of, monkeypatch):
    monkeypatch.setattr(workers, "STUCK", 1)
    pool = pool_of(sleep)
    with pytest.raises(InputError, match="No images arrived for 1 seconds"):
        list(pool.run([1000]))
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 60


def test_other_errors_stay_what_they_are(pool_of):
    with pytest.raises(InputError, match="the file is broken"):
        list(pool_of(fail, 0).run([1]))
    with pytest.raises(RuntimeError, match="of another kind"), dead_workers_named():
        raise RuntimeError("of another kind")


def test_a_program_that_forgets_its_workers_ends_all_the_same():
    """multiprocessing's own end would wait for ever for workers that ignore its SIGTERM."""
    program = """
import torch
from hardmix.data.workers import WorkerPool
pool = WorkerPool(abs, 2, torch.device("cpu"))
run = pool.run(list(range(-100, 0)))
assert next(run) == 100
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_is_sent_lies_in_shared_memory_and_is_the_same_after_the_way(pool_of):
    (sent,) = pool_of(shared_numbers, 1).run([7])
    assert sent.is_shared()
    assert torch.equal(sent, torch.full((2, 3, 5), 7.0))

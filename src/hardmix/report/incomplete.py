"""Sentences about what a run with intact files lacks for its page."""

from hardmix.report.evaluation_tables import NO_EVALUATIONS
from hardmix.runs.labels import method_uses
from hardmix.runs.reading import RunRecord, number
from hardmix.settings.saved import flatten


def incomplete(run: RunRecord) -> list[str]:
    """Return sentences on missing evaluations or labels, unfinished training, stale results."""
    return [*_unevaluated(run), *_unlabelled(run), *_unfinished(run), *_stale_results(run)]


def _unevaluated(run: RunRecord) -> list[str]:
    if run.results.keys() - set(NO_EVALUATIONS) or "verdict" in run.results:
        return []
    return [f"{run.name}: no evaluation yet; try hardmix knn and hardmix linear."]


def _unlabelled(run: RunRecord) -> list[str]:
    """Methods with a queue log false negatives if there are labels."""
    seen = {name for line in run.metrics for name in line}
    if not run.metrics or not method_uses(run.settings, "train.queue_size"):
        return []
    if "false_negatives_top" in seen or "knn" in seen:
        return []
    return [f"{run.name}: its images have no labels, so there are no false negatives and no k-NN."]


def _unfinished(run: RunRecord) -> list[str]:
    planned = [run.settings.get(f"train.{name}") for name in ("epochs", "stop_epoch")]
    last = min((n for n in planned if isinstance(n, int)), default=None)
    reached = [number(line.get("epoch")) for line in run.metrics]
    done = max((int(n) + 1 for n in reached if n is not None), default=0)
    if last is None or done == 0 or "pretrain" in run.results:
        return []
    return [f"{run.name}: training is unfinished (epoch {done} of {last})."]


def _stale_results(run: RunRecord) -> list[str]:
    """Return sentences on results written before the run was resumed with other epochs."""
    sentences = []
    for name, result in run.results.items():
        measured = result.get("run")
        if not isinstance(measured, dict) or not run.settings:
            continue
        then, now = flatten(measured), run.settings
        for setting in ("train.epochs", "train.stop_epoch"):
            if setting in then and then[setting] != now.get(setting):
                sentences.append(
                    f"{run.name}: results/{name}.json was measured when {setting} was"
                    f" {then[setting]}; it is now {now.get(setting)}."
                )
    return sentences

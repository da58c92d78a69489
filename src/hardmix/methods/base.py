"""What every method has in common."""

from jaxtyping import Float
from torch import Tensor

from hardmix.runtime.distributed import highest


class NonFiniteError(Exception):
    """A loss or gradient is NaN or infinite; raised by all ranks at the same step."""


def check_embeddings(**embeddings: Float[Tensor, "batch dim"]) -> None:
    """Refuse embeddings that are no numbers, on whichever rank, before anything is made of them."""
    broken = [name for name, rows in embeddings.items() if not bool(rows.isfinite().all())]
    if highest(len(broken)):
        where = f"the {' and the '.join(broken)} embeddings" if broken else "another rank's output"
        raise NonFiniteError(f"{where} hold NaN or infinity")

"""A model of clusters with real NICs, from what posting operations costs a core."""

from __future__ import annotations

import rows

__all__ = ["model"]

# NICs, gigabits a second of each, and what Mooncake has published for them in GB/s.
CLUSTERS = ((4, 200, 87.0), (8, 400, 190.0))
SLICES = (4 << 10, 64 << 10, 1 << 20)


def model(bench: str, operations_per_s: float, payload: float) -> list[rows.Row]:
    """What NICs would carry if nothing but their wires and one core's posting were in the way.

    Args:
        bench: the name of the benchmark.
        operations_per_s: posted and completed by one core.
        payload: the share of a wire's bits that are not headers.
    """
    made = []
    for count, gigabits, published in CLUSTERS:
        wire = count * gigabits / 8 * payload
        for slice_bytes in SLICES:
            posted = operations_per_s * slice_bytes / 1e9
            details = {"is_a_model": True, "cores_needed": wire / posted, "wire_gb_per_s": wire}
            what = f"model: {count} x {gigabits}G, slices of {slice_bytes >> 10} KiB, one core"
            value = min(wire, posted)
            made.append(rows.Row(bench, what, "GB/s", value, "published", published, None, details))
    return made

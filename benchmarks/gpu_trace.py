"""What a profiler's trace says of training steps: copies beside kernels, and who waits for the device.

Computes from the JSON that torch.profiler exports alone. Times are microseconds of its clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]
Span = tuple[float, float]

STEP = "ProfilerStep#"
# In which the host waits for the device; torch calls those of the driver where a library does.
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
# They ask for a number: of the device, or of a tensor of the host, which waits for nothing.
READS = ("aten::item", "aten::_local_scalar_dense")
TO_DEVICE, FROM_DEVICE = "Memcpy HtoD", "Memcpy DtoH"
PAGEABLE = "Pageable"
# What names a place in the program.
AROUND = ("cpu_op", "user_annotation")
NUM_COSTLIEST = 12


def describe_trace(events: Sequence[Event]) -> dict[str, Any]:
    """All of it, of the recorded steps: numbers are those of all steps together."""
    steps = steps_of(events)
    within = [event for event in events if _is_span(event) and _starts_in(event, steps)]
    waits = [event for event in within if event["name"] in WAITS]
    reads = [event for event in within if event["name"] in READS]
    copies = [event for event in events if _is_copy(event) and _starts_in(event, steps)]
    kernels = _spans(event for event in events if event.get("cat") == "kernel")
    to_device = [event for event in copies if event["name"].startswith(TO_DEVICE)]
    busy = merged([*kernels, *_spans(copies)])
    seconds = sum(end - begin for begin, end in steps)
    return {
        "steps": len(steps),
        "ms of a step": seconds / max(1, len(steps)) / 1e3,
        "waits": _counted(event["name"] for event in waits),
        "reads": _counted(event["name"] for event in reads),
        "places of waits": _counted(places_of(waits, events)),
        "reads that wait": sum(_holds_any(read, waits) for read in reads),
        "copies to the device": len(to_device),
        "MB to the device": sum(event.get("args", {}).get("bytes", 0) for event in to_device) / 1e6,
        "share hidden": share_within(_spans(to_device), kernels),
        "pageable copies": sum(PAGEABLE in event["name"] for event in copies),
        "copies from the device": sum(event["name"].startswith(FROM_DEVICE) for event in copies),
        "share that the device works": share_within(steps, busy),
        "costliest kernels, ms of a step": _costliest(events, steps),
    }


def steps_of(events: Iterable[Event]) -> list[Span]:
    """The recorded steps on the host, in the order of time."""
    return sorted(
        _span(event)
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(STEP)
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def share_within(spans: Iterable[Span], others: Iterable[Span]) -> float | None:
    """The share of some time that is also in others; None where there is no such time."""
    spans, others = merged(spans), merged(others)
    whole = sum(end - begin for begin, end in spans)
    both, place = 0.0, 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        beside = place
        while beside < len(others) and others[beside][0] < end:
            both += min(end, others[beside][1]) - max(begin, others[beside][0])
            beside += 1
    return both / whole if whole else None


def places_of(waits: Sequence[Event], events: Iterable[Event]) -> list[str]:
    """Where each wait is: the ranges and operations around it on its thread, the outermost first."""
    of_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in (*(event for event in events if event.get("cat") in AROUND and _is_span(event)), *waits):
        of_thread[event.get("tid")].append(event)
    found = []
    for members in of_thread.values():
        around: list[Event] = []
        # Of two that begin together the longer one comes first: it lies around the other.
        for event in sorted(members, key=lambda event: (event["ts"], -event["dur"])):
            while around and _span(around[-1])[1] <= event["ts"]:
                around.pop()
            if event["name"] in WAITS:
                names = [each["name"] for each in around if not each["name"].startswith(STEP)]
                # The whole way is long: what the loop calls it, and what waits.
                found.append(" > ".join([*names[:1], *names[1:][-2:], event["name"]]))
            else:
                around.append(event)
    return found


def _holds_any(event: Event, others: Iterable[Event]) -> bool:
    begin, end = _span(event)
    same = (other for other in others if other.get("tid") == event.get("tid"))
    return any(begin <= first and last <= end for first, last in map(_span, same))


def _costliest(events: Iterable[Event], steps: Sequence[Span]) -> dict[str, float]:
    """Of kernels and copies by name, the most of them."""
    spent: Counter[str] = Counter()
    for event in events:
        if (event.get("cat") == "kernel" or _is_copy(event)) and _starts_in(event, steps):
            spent[event["name"][:100]] += event["dur"]
    return {name: time / len(steps) / 1e3 for name, time in spent.most_common(NUM_COSTLIEST)}


def _is_span(event: Event) -> bool:
    return event.get("ph") == "X" and "ts" in event and "dur" in event


def _is_copy(event: Event) -> bool:
    return event.get("cat") == "gpu_memcpy"


def _starts_in(event: Event, steps: Sequence[Span]) -> bool:
    place = bisect_right(steps, (event["ts"], float("inf"))) - 1
    return place >= 0 and event["ts"] < steps[place][1]


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _spans(events: Iterable[Event]) -> list[Span]:
    return [_span(event) for event in events]


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common(20))

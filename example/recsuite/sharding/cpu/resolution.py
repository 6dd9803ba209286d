"""From ids to rows in the rank that owns them, and to the row of the unknown for those that have none.

An owner tells that an id has no row by a mark in its place. Whoever asked then takes the unknown's row, which
came in the same exchange, and so the gradients of such ids are the unknown's.
"""

from __future__ import annotations

import torch

from recsuite.sharding.cpu.groups import DynamicPart
from recsuite.sharding.cpu.lookup import LookupRequest, TableLayout
from recsuite.sharding.dynamic.spec import NO_ROW

# The bits of a float32 that is no number, and that no arithmetic makes.
MARK = 0x7FC0DEAD


@torch.no_grad()
def resolve(layout: TableLayout, request: LookupRequest, is_training: bool) -> None:
    """Turn the ids that came into rows of this rank's groups. Not collective."""
    pieces: dict[str, list[slice]] = {name: [] for name in layout.dynamic}
    names = {id(part): name for name, part in layout.dynamic.items()}
    for part, piece in layout.pieces(request):
        if isinstance(part, DynamicPart):
            pieces[names[id(part)]].append(piece)
    for name, part in layout.dynamic.items():
        _resolve_part(part, request, pieces[name], is_training)
    missing = (request.rows == NO_ROW).nonzero().view(-1)
    request.missing = missing if len(missing) else None
    request.is_resolved = True


def _resolve_part(part: DynamicPart, request: LookupRequest, pieces: list[slice], is_training: bool) -> None:
    if len(pieces) == 1:
        request.rows[pieces[0]] = part.rows_of(request.rows[pieces[0]], is_training)
    elif pieces:
        # All that a step wants, whoever wants it, at once: who comes in must not depend on the ranks.
        ids, inverse = torch.cat([request.rows[piece] for piece in pieces]).unique(return_inverse=True)
        rows = part.rows_of(ids, is_training)[inverse]
        lengths = [piece.stop - piece.start for piece in pieces]
        for piece, found in zip(pieces, rows.split(lengths), strict=True):
            request.rows[piece] = found


def mark_missing(request: LookupRequest, rows: torch.Tensor) -> None:
    """Tell in the rows that go back, float32 [R, D], which ids have none."""
    if request.missing is not None:
        rows.view(torch.int32)[request.missing, 0] = MARK


def take_unknown(request: LookupRequest, rows: torch.Tensor) -> None:
    """Have the ids whose rows, of those that came back, float32 [n, D], are marked look at the unknown's."""
    is_missing = rows.view(torch.int32)[:, 0] == MARK
    missing = is_missing.nonzero().view(-1)
    if not len(missing):
        return
    sent = torch.tensor(request.sent)
    parts = torch.arange(sent.size(1)).repeat(len(sent)).repeat_interleave(sent.view(-1))
    instead = torch.arange(len(rows))
    instead[missing] = torch.tensor(request.unknowns)[parts[missing]]
    request.inverse = instead[request.inverse]

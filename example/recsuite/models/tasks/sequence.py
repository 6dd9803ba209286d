"""To find which item comes next in the order of what a user had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from recsuite.config.section import require
from recsuite.config.sections.model import HSTU, SAS
from recsuite.datasets.schema import Feature, Schema
from recsuite.models.sequences.blocks import HstuBlock, SasBlock
from recsuite.models.sequences.head import SequenceHead
from recsuite.models.tasks.ranking import Ranking
from recsuite.models.tasks.task import Sizes, hidden_widths


class NextItem(Ranking):
    """See `Task`; judged and trained as a ranking is."""

    name = "sequence"
    dense_parts = ("blocks",)
    reads_order = True

    def make_head(
        self, schema: Schema, features: Sequence[Feature], sizes: Sizes, mean_label: float = 0.0
    ) -> SequenceHead:
        """See `Task`."""
        dim, width = sizes.embedding_dim, sizes.num_places
        # Here, for what --embedding_dim is without a flag is known only now.
        require(
            dim % sizes.num_heads == 0,
            f"--embedding_dim {dim} cannot be divided among --num_heads {sizes.num_heads}; give a multiple",
        )
        blocks: list[nn.Module] = []
        for number in range(sizes.num_blocks):
            if sizes.block == HSTU:
                blocks.append(HstuBlock(dim, sizes.num_heads, width, sizes.dropout, number))
            else:
                blocks.append(SasBlock(dim, sizes.num_heads, width, sizes.mlp_dims, sizes.dropout, number))
        return SequenceHead(features, dim, (schema.user, schema.item), blocks, width, sizes.dropout)

    def sizes_of(self, shapes: Mapping[str, Sequence[int]], embedding_dim: int) -> Sizes:
        """See `Task`."""
        heads, width = shapes["blocks.0.attention.bias.places"]
        number = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        if min(heads, width) < 1 or embedding_dim % heads:
            raise ValueError(f"{embedding_dim} cannot be divided among {heads} heads")
        widths = hidden_widths(shapes, "blocks.0.layers")
        block = SAS if "blocks.0.layers.0.weight" in shapes else HSTU
        return Sizes(embedding_dim, widths, width, num_blocks=number, num_heads=heads, block=block)


TASK = NextItem()

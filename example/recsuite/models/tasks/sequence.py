"""To find which item comes next in the order of what a user had."""

from __future__ import annotations

from torch import nn

from recsuite.config.section import require
from recsuite.config.sections.model import HSTU, ModelConfig
from recsuite.models.sequences.blocks import HstuBlock, SasBlock
from recsuite.models.sequences.head import SequenceHead
from recsuite.models.tasks.ranking import Ranking
from recsuite.models.tasks.task import ModelData


class NextItem(Ranking):
    """See `Task`; judged and trained as a ranking is."""

    name = "sequence"
    reads_order = True

    def make_model(self, data: ModelData, args: ModelConfig) -> SequenceHead:
        """See `Task`."""
        dim, width = args.embedding_dim, data.history
        # Here, for what --embedding_dim is without a flag is known only now.
        require(
            dim % args.num_heads == 0,
            f"--embedding_dim {dim} cannot be divided among --num_heads {args.num_heads}; give a multiple",
        )
        blocks: list[nn.Module] = []
        for number in range(args.num_blocks):
            if args.block == HSTU:
                blocks.append(HstuBlock(dim, args.num_heads, width, args.dropout, number))
            else:
                blocks.append(SasBlock(dim, args.num_heads, width, args.mlp_dims, args.dropout, number))
        return SequenceHead(data.features, dim, data.schema.ids, blocks, width, args.dropout)


TASK = NextItem()

"""A prepared corpus as parquet, for other tools: one row a document, `input_ids` and `loss_mask`. Reads back as tokens."""

from pathlib import Path

import numpy as np

from draftsmith.data.shards import SPLITS, Corpus

_ROWS = 1024  # documents of a row group


def export_parquet(directory: Path) -> list[Path]:
    """Write DIR/train.parquet and DIR/held_out.parquet beside the shards (empty splits are left out); returns them."""
    written = []
    for split in SPLITS:
        corpus = Corpus.open(directory, split)
        if len(corpus):
            written.append(_write(corpus, directory / f"{split}.parquet"))
    return written


def _write(corpus: Corpus, path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))])
    temporary = path.with_name(f".{path.name}.tmp")
    with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for start in range(0, len(corpus), _ROWS):
            end = min(start + _ROWS, len(corpus))
            offsets = corpus.offsets[start : end + 1]
            tokens, mask = corpus.flat(int(offsets[0]), int(offsets[-1]))
            bounds = pa.array((offsets - offsets[0]).astype(np.int32))
            columns = [pa.ListArray.from_arrays(bounds, pa.array(values)) for values in (tokens, mask)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    temporary.replace(path)
    return path

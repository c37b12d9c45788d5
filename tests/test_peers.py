"""What other implementations reach: the table beside the records, and its lines in the plot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.made_devices import gpu
from tests.made_records import decode, made_record
from tuner import plots
from tuner.errors import InputFileError
from tuner.results import best_by_context, read_peers

HEADER = "sequences,context,query_heads,kv_heads,head_size,kv_type,api,peer"
TABLE = f"""{HEADER},median_us,mb,percent_of_read
1,4096,32,8,128,fp8,CUDA,slow,20.0,8.4,10.0
1,4096,32,8,128,fp8,CUDA,fast,10.0,8.4,17.5
1,16384,32,8,128,fp8,CUDA,slow,30.0,33.6,30.0
1,4096,64,8,128,fp8,CUDA,fast,11.0,8.4,17.0
1,131072,32,8,128,q8_0,Vulkan,other,360.0,268.4,17.0
"""


def table(folder: Path, text: str = TABLE) -> Path:
    (folder / "peers.csv").write_text(text)
    return folder


def test_a_folder_without_a_table_has_no_peers(tmp_path: Path) -> None:
    assert read_peers(tmp_path) == ()


def test_lines_are_the_fastest_of_each_kind(tmp_path: Path) -> None:
    of = [peer for peer in read_peers(table(tmp_path)) if peer.solves(decode(1, 4096, gqa=4))]
    assert best_by_context(of) == {
        "fp8 (CUDA)": [(4096, 17.5), (16384, 30.0)],
        "q8_0 (Vulkan)": [(131072, 17.0)],
    }


def test_peers_are_of_the_same_heads_and_batch(tmp_path: Path) -> None:
    peer = read_peers(table(tmp_path))[0]
    same = decode(1, 16384, gqa=4)
    assert peer.solves(same)
    assert not peer.solves(decode(8, 4096, gqa=4))
    assert not peer.solves(decode(1, 4096, gqa=8))
    assert not peer.solves(msgspec.structs.replace(same, lengths="uniform:7"))
    assert not peer.solves(msgspec.structs.replace(same, window=128))


def test_a_wrong_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"peers\.csv:3: .*median_us"):
        read_peers(table(tmp_path, TABLE.replace("fast,10.0", "fast,soon")))
    with pytest.raises(InputFileError, match=r"peers\.csv:2: .*missing.*`kv_type`"):
        read_peers(table(tmp_path, TABLE.replace("kv_type", "type")))


def test_a_single_context_cuts_no_line_of_the_peers(tmp_path: Path) -> None:
    made = [made_record(decode(1, 16384, gqa=4), {"strategy": "packed_f16"})]
    (axes,) = plots.utilisation_by_context(made, gpu(), peers=read_peers(table(tmp_path))).axes
    dotted = [x for line in axes.lines if line.get_linestyle() == ":" for x in line.get_xdata()]
    left, right = axes.get_xlim()
    assert left < min(dotted) < max(dotted) == 16384 < right


def test_peers_are_drawn_dotted_as_far_as_was_tuned(tmp_path: Path) -> None:
    values = {"strategy": "packed_f16"}
    made = [made_record(decode(1, context, gqa=4), values) for context in (4096, 16384)]
    figure = plots.utilisation_by_context(made, gpu(), peers=read_peers(table(tmp_path)))
    dotted = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert [list(line.get_ydata()) for line in dotted] == [[17.5, 30.0]]

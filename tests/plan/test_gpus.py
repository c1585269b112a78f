"""Names of GPUs for `--gpu`, and the published figures of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megacp.plan import command
from megacp.plan.hardware import GPUS, hardware, hardware_here, nominal_sheet, sheet_like
from megacp.plan.sheet import read_sheet

SIZES = "--world-size 1 --vocab-size 64 --num-layers 1 --seq-length 64".split()


@pytest.mark.parametrize("name", ["h100", "H100", "RTX 4090", "rtx-4090", "RTX6000Ada", "L40S"])
def test_the_case_and_the_spaces_of_a_name_do_not_matter(name: str) -> None:
    known = name.lower().replace(" ", "").replace("-", "")
    assert hardware(name, "infiniband") == hardware(known, "infiniband")


def test_an_unknown_gpu_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--gpu", "tpu9", *SIZES]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --gpu tpu9 is not a known GPU (")
    assert [gpu for gpu in GPUS if gpu not in said] == []


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA H100-SXM5-80GB", "h100"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_a_device_is_known_by_the_name_that_it_reports(device: str, gpu: str) -> None:
    here = hardware_here(device, None, "infiniband")
    assert here.source == f"{device}: times from the published rates of {gpu}"
    assert here.products == hardware(gpu, "infiniband").products


def test_figures_of_gpus_are_plausible_and_sorted_by_memory() -> None:
    """A plan that does not fit suggests the first GPU of the sheet with enough memory."""
    sizes = [hardware(gpu, "infiniband").memory for gpu in GPUS]
    # the sizes on the boxes, rounded to whole GB
    for size in sizes:
        assert any(0.9 * box <= size * 1.0737 <= 1.08 * box for box in (24, 48, 80, 141, 180, 288))
    pairs = zip(sizes, sizes[1:], strict=False)
    # cards of 24 and of 48 GB differ by up to 0.2 GiB
    assert [pair for pair in pairs if pair[0] > pair[1] + 0.2] == []


def test_a_card_on_pci_express_4_reaches_its_host_at_half_the_rate() -> None:
    hosts = {gpu: hardware(gpu, "infiniband").host for gpu in GPUS}
    assert hosts["h100"] == 2 * hosts["rtx4090"]
    assert sheet_like("l4")["host"] == nominal_sheet()["host"] / 2


def test_the_sheet_of_a_single_gpu_can_be_written_and_read(tmp_path: Path) -> None:
    """`calibrate` begins from such a sheet, and a run reads what it has written."""
    for gpu in GPUS:
        path = tmp_path / f"{gpu}.yaml"
        path.write_text(yaml.safe_dump(sheet_like(gpu)))
        assert read_sheet(str(path), "infiniband") == sheet_like(gpu)

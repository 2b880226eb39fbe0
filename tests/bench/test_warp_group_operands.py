"""Machine code in which a register is written too early for the product that reads it, and code in which none is."""

import random

import pytest
from warp_group_operands import overwritten_operands

PRODUCT = "HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR8].tnspB, R56, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*instructions: str) -> str:
    """As cuobjdump prints it."""
    return "\n".join(f"        /*{16 * n:04x}*/   {one} ;   /* 0x0 */" for n, one in enumerate(instructions))


@pytest.mark.parametrize(
    ("written", "early"),
    [
        ("FADD R91, R2, R3", True),
        ("FADD R92, R2, R3", False),
        ("LDS.128 R85, [R13+UR4]", True),
        ("LDS.128 R84, [R13+UR4]", False),
        ("LDSM.16.MT88.4 R86, [R129+0x10800]", True),
        ("IMAD.WIDE R87, R2, R3, R4", True),
        ("SHFL.IDX PT, R90, R27, R241, 0x1f", True),
        ("STS.128 [R88], R88", False),
        ("ISETP.GE.AND P3, PT, R88, R3, PT", False),
        ("HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], R88", False),
    ],
)
def test_which_registers_an_instruction_writes(written: str, early: bool) -> None:
    assert bool(overwritten_operands(listing(PRODUCT, written, WAIT, "EXIT"))) == early
    assert overwritten_operands(listing(PRODUCT, WAIT, written, "EXIT")) == []


def test_a_wait_that_leaves_a_product_running_is_none() -> None:
    code = listing(PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "FADD R88, R2, R3", WAIT)
    ((product, written),) = overwritten_operands(code)
    assert (product.address, written.address) == (0, 0x20)


@pytest.mark.parametrize("seed", range(200))
def test_every_way_is_followed(seed: int) -> None:
    """Random code with branches: a write is too early if a walk from the product meets it before a wait."""
    draws = random.Random(seed)
    size = draws.randrange(4, 30)
    code = [draws.choice(["FADD R88, R2, R3", "FADD R1, R2, R3", "FADD R1, R2, R3", WAIT]) for _ in range(size)]
    jumps = {place: draws.randrange(size) for place in draws.sample(range(size), size // 3)}
    always = {place for place in jumps if draws.random() < 0.3}
    start = draws.randrange(size)
    jumps.pop(start, None)
    for place, target in jumps.items():
        code[place] = f"{'' if place in always else '@!P3 '}BRA 0x{16 * target:x}"
    code[start] = PRODUCT
    met = set[int]()
    for _ in range(3000):
        place = start + 1
        for _ in range(60):
            if place >= size or code[place] == WAIT:
                break
            if code[place].startswith("FADD R88"):
                met.add(16 * place)
            goes = place in jumps and (place in always or draws.random() < 0.5)
            place = jumps[place] if goes else place + 1
    assert {written.address for _, written in overwritten_operands(listing(*code))} == met

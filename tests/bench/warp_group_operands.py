"""Registers of warp-group products (wgmma, Hopper) that are written before the products have read them.

Such a product is asynchronous, and its first operand may be in registers. ptxas of CUDA 12.8 and 12.9, which Triton up
to 3.8 takes for Hopper, sometimes reuses these registers too early, so that the product is wrong
(triton-lang/triton#11781; mended in CUDA 13.3, and Triton 3.9 takes 13.4). Machine code shows it: on every way from a
product to the wait for it, no instruction may write the operand's registers.
"""

import re
from dataclasses import dataclass

OPERAND_REGISTERS = 4  # 32-bit registers of a thread that hold its part of a first operand: 64 rows by 32 bytes
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*([^;]*);", re.MULTILINE)
_PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")
_FIRST_REGISTER = re.compile(r"(?:P\w+, )?R(\d+)\b")
_TARGET = re.compile(r"0x([0-9a-f]+)$")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a listing by cuobjdump. `guarded`: a predicate decides whether it is executed."""

    address: int
    guarded: bool
    name: str
    operands: str

    @property
    def written(self) -> range:
        """The registers that it may write: those of its first operand."""
        first = _FIRST_REGISTER.match(self.operands)
        if first is None or self.name.startswith("HGMMA"):
            return range(0)
        start, parts = int(first[1]), self.name.split(".")
        if "128" in parts or "4" in parts:
            return range(start, start + 4)
        return range(start, start + (2 if {"64", "2", "WIDE"} & {*parts} or parts[0][0] == "D" else 1))

    @property
    def waits_for_all(self) -> bool:
        return self.name == "WARPGROUP.DEPBAR.LE" and self.operands.strip() == "gsb0, 0x0"


def overwritten_operands(listing: str) -> list[tuple[Instruction, Instruction]]:
    """Return pairs of a product and an instruction that may write its operand's registers before it has read them."""
    code = [Instruction(int(at, 16), bool(when), name, rest) for at, when, name, rest in _INSTRUCTION.findall(listing)]
    places = {one.address: place for place, one in enumerate(code)}
    return [
        (one, code[place])
        for start, one in enumerate(code)
        if one.name.startswith("HGMMA") and (operand := _PRODUCT.match(one.operands))
        for place in _reached(code, places, start + 1)
        if {*code[place].written} & {*range(int(operand[1]), int(operand[1]) + OPERAND_REGISTERS)}
    ]


def _reached(code: list[Instruction], places: dict[int, int], start: int) -> list[int]:
    """Return the places of all instructions that may be executed from `start` on before a wait for all products."""
    found, waiting = set[int](), [start]
    while waiting:
        place = waiting.pop()
        if place >= len(code) or place in found or code[place].waits_for_all:
            continue
        found.add(place)
        one = code[place]
        if one.name.startswith("BRA") and (target := _TARGET.search(one.operands.strip())):
            waiting.append(places[int(target[1], 16)])
        if one.guarded or not one.name.startswith(("BRA", "EXIT")):
            waiting.append(place + 1)
    return sorted(found)

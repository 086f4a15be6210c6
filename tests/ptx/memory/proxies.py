"""Whether tensor cores read from shared memory only what a proxy fence has made visible to them.

wgmma and tcgen05.mma read shared memory by the async proxy. What threads copied there (cp.async) or stored there they
see for sure after fence.proxy.async alone (PTX ISA, memory consistency model, proxies). Every way through the code is
looked at: a matmul after copies that arrived since the last fence is a fault, whichever tile it reads.
"""

from ptx.program import Instruction, Program


def _arrives(x: Instruction) -> bool:
    return x.name == "cp" and ("wait_group" in x.modifiers or "wait_all" in x.modifiers)


def _fences(x: Instruction) -> bool:
    return x.name == "fence" and x.has("proxy", "async")


def is_product(x: Instruction) -> bool:
    """Of tiles in shared memory."""
    return (x.name == "wgmma" and "mma_async" in x.modifiers) or (x.name == "tcgen05" and "mma" in x.modifiers)


def unfenced(program: Program) -> list[Instruction]:
    """Matmuls that some way reaches with copies behind the last fence."""
    code = program.instructions
    reached: list[set[bool]] = [set() for _ in code]  # by place: are there such copies?
    todo = [(0, False)]
    while todo:
        place, pending = todo.pop()
        while place < len(code) and pending not in reached[place]:
            reached[place].add(pending)
            x = code[place]
            if _arrives(x):
                pending = True
            elif _fences(x):
                pending = False
            if x.name == "bra" and x.operands[0].name.startswith("$"):  # type: ignore[union-attr]  # not in assembly
                target = program.labels[x.operands[0].name]  # type: ignore[union-attr]
                if x.guard is not None:
                    todo.append((place + 1, pending))
                place = target
            elif x.name in ("ret", "exit") and x.guard is None:
                break
            else:
                place += 1
    return [x for x, pending in zip(code, reached, strict=True) if is_product(x) and True in pending]

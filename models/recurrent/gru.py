"""A GRU over all steps of a sequence, with its gradient written out.

Autograd records ten operations per step and runs as many backwards. Written out, a step
backwards is one product and three elementwise operations, and the weights' gradient is
one product for all steps.

Time comes first: tensors are ``[T, rows, features]``, or ``[T, agents, rows,
features]`` with one network per agent.
"""

from typing import Any

import torch
from torch import Tensor

from marl_collect.policies.fused.elementary import gru_step


def run_gru(
    projected: Tensor, first: Tensor, keep: Tensor | None, matrix: Tensor, bias: Tensor
) -> Tensor:
    """Return the state after each step.

    Args:
        projected: the cell's ``input`` of all steps, ``[T, *rows, 3 * H]``.
        first: state before the first step, ``[*rows, H]``.
        keep: ``[T, *rows, 1]``, 0 where a state is reset before the step, and else 1.
        matrix: maps a state to the gates, ``[H, 3 * H]``, or one per agent.
        bias: of the gates, ``[3 * H]`` or ``[agents, 1, 3 * H]``.

    Returns:
        ``[T, *rows, H]``.
    """
    inputs = (projected, first, keep, matrix, bias)
    if torch.is_grad_enabled():
        out: Tensor = _GRU.apply(*inputs)
        return out
    return _forward(*inputs, save=False)[0]


def _forward(
    projected: Tensor,
    first: Tensor,
    keep: Tensor | None,
    matrix: Tensor,
    bias: Tensor,
    *,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return states, gates, candidates, and the states after resets if saved."""
    steps, size = len(projected), first.shape[-1]
    rows = projected.shape[1:-1]
    # What the products of the states are added to, in place.
    gates = torch.empty_like(projected, memory_format=torch.contiguous_format)
    joint = slice(0, 2 * size)
    torch.add(projected[..., joint], bias[..., joint], out=gates[..., joint])
    gates[..., 2 * size :] = bias[..., 2 * size :]
    out = projected.new_empty(steps, *rows, size)
    new = projected[..., 2 * size :].clone(memory_format=torch.contiguous_format)
    before = torch.empty_like(out) if save and keep is not None else None
    product = Tensor.addmm_ if matrix.ndim == 2 else Tensor.baddbmm_
    views = [out, new, gates, gates[..., joint], *gates.chunk(3, -1)]
    resets = () if keep is None else keep.unbind(0)
    carried = () if before is None else before.unbind(0)
    h = first
    for step, (after, candidate, whole, both, reset, update, h_new) in enumerate(
        zip(*(view.unbind(0) for view in views), strict=True)
    ):
        if resets:
            h = torch.mul(h, resets[step], out=carried[step] if carried else None)
        product(whole, h, matrix)
        both.sigmoid_()
        candidate.addcmul_(reset, h_new).tanh_()
        h = torch.lerp(candidate, h, update, out=after)
    return out, gates, new, before


aten: Any = torch.ops.aten


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        first: Tensor,
        keep: Tensor | None,
        matrix: Tensor,
        bias: Tensor,
    ) -> Tensor:
        inputs = (projected, first, keep, matrix, bias)
        out, gates, new, before = _forward(*inputs, save=True)
        ctx.save_for_backward(*inputs, out, gates, new, before)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, gates, new, before = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():  # The gradient shall be differentiated.
            return _recorded_gradient(inputs, needed, grads[0])
        _, first, keep, matrix, bias = inputs
        if before is None:
            before = torch.cat([first.unsqueeze(0), out[:-1]])
        size = first.shape[-1]
        reset, update, h_new = gates.chunk(3, -1)
        # The gradient at the gates is that of the state times these factors.
        factors = torch.empty_like(gates)
        at_reset, at_update, at_new = factors.chunk(3, -1)
        factor_new = aten.tanh_backward(1 - update, new)
        torch.mul(factor_new, reset, out=at_new)
        aten.sigmoid_backward(factor_new * h_new, reset, grad_input=at_reset)
        aten.sigmoid_backward(before - new, update, grad_input=at_update)
        at_gates, at_states = torch.empty_like(gates), torch.empty_like(new)
        carry = torch.zeros_like(at_states[0])
        back = matrix.mT.contiguous()
        resets = () if keep is None else keep.unbind(0)
        views = (
            grads[0].unbind(0),
            at_states.unbind(0),
            at_states.unsqueeze(-2).unbind(0),
            factors.unflatten(-1, (3, size)).unbind(0),
            at_gates.unflatten(-1, (3, size)).unbind(0),
            at_gates.unbind(0),
            update.unbind(0),
        )
        product = Tensor.addmm_ if matrix.ndim == 2 else Tensor.baddbmm_
        for step in reversed(range(len(out))):
            grad, state, wide, factor, split, joint, share = (v[step] for v in views)
            torch.add(grad, carry, out=state)
            torch.mul(wide, factor, out=split)
            torch.mul(state, share, out=carry)
            product(carry, joint, back)
            if resets:
                carry.mul_(resets[step])
        at_matrix = at_bias = None
        if needed[3] or needed[4]:
            if matrix.ndim == 2:
                flat, states = at_gates.flatten(0, 1), before.flatten(0, 1)
            else:
                flat, states = (
                    t.transpose(0, 1).flatten(1, 2) for t in (at_gates, before)
                )
            at_matrix = states.mT @ flat
            at_bias = flat.sum(-2).reshape(bias.shape)
        # The candidate's share of the hidden product is scaled by the reset gate.
        at_gates[..., 2 * size :] = at_states * factor_new
        return at_gates, carry, None, at_matrix, at_bias


def _recorded_gradient(
    inputs: list[Any], needed: tuple[bool, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradient of the inputs by autograd, which can be differentiated."""
    projected, h, keep, matrix, bias = inputs
    multiply = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    states = []
    for step, features in enumerate(projected.unbind(0)):
        if keep is not None:
            h = h * keep[step]
        h = gru_step(features, multiply(bias, h, matrix), h)
        states.append(h)
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(
        torch.autograd.grad(torch.stack(states), wanted, grad, create_graph=True)
    )
    return tuple(next(gradients) if need else None for need in needed)

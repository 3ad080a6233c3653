"""The updates of DDC-ASGD as loops that read and write each vector once; see :mod:`nfdt.update_rules.ddc`.

The rules are the reference: :mod:`nfdt.shard.loop_engine` prepares the numbers that hold for a whole push with the
rules' own functions, and a test compares these loops with the rules' NumPy form.

A loop handles one block of rows after the other, a tile of at most ``TILE`` columns at a time: first the sums over each
block, then its factor, then the update and the reply, while all of it is in the processor's cache. Numba recompiles
these functions when this file changes, and only then; what they call is therefore here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nfdt.core.arrays.loops import reordered
from nfdt.update_rules.reliability import NORM_EPSILON, STEP_DECAY, STEP_EPSILON, WEIGHT_SHARE

TILE = 1024  # columns, or elements of a vector, that are handled at once

F32: Any = np.float32
_NORM_EPSILON, _STEP_EPSILON = F32(NORM_EPSILON), F32(STEP_EPSILON)
_STEP_DECAY, _STEP_SHARE = F32(STEP_DECAY), F32(1.0 - STEP_DECAY)
_WEIGHT_SHARE = F32(WEIGHT_SHARE)
_SMALLEST = F32(np.finfo(np.float32).tiny)
_ONE, _ZERO = F32(1.0), F32(0.0)

# Positions in the vector ``numbers``. One step releases RELEASED of the reserve and AT_ONCE of the scaled gradient.
RATE, KEPT, RELEASED, AT_ONCE, LATER, AHEAD, DECAY_RATE, DECAY_AHEAD = range(8)
LAMBDA, CLIP, GAP, SHARE, BETA_2, SECOND_SHARE, EPSILON = range(8, 15)
NUMBERS = 15


@reordered
def update(
    parts: Any,
    gradient: Any,
    weights: Any,
    backup: Any,
    backup_difference: Any,
    reply: Any,
    reply_anchor: Any,
    reply_difference: Any,
    reserve: Any,
    second: Any,
    step_square: Any,
    factor_mean: Any,
    factor_square: Any,
    numbers: Any,
) -> None:
    """Apply one gradient to some parts of a shard.

    Args:
        parts: For each part its first element and block, blocks, rows and columns of a block; int64, shape ``(k, 5)``.
        gradient: Finite, shape ``(n,)`` as all vectors of elements; float32, as all arrays but where stated.
        weights: Changed.
        backup: Weights that the gradient was computed on, or their anchor.
        backup_difference: Upper halves of the backup's difference to its anchor, uint16; None for an exact backup.
        reply: Written: the weights for the worker.
        reply_anchor: Anchor of the reply; None for an exact one.
        reply_difference: Written: the upper halves of the reply's difference to its anchor, uint16; None likewise.
        reserve: Changed.
        second: Second moment, changed; None for SGD.
        step_square: Mean squared steps, changed; shape ``(blocks,)``.
        factor_mean: Mean factors, changed, shape ``(blocks,)``; None without weight decay.
        factor_square: Mean squared factors, changed, shape ``(blocks,)``; None for SGD or without weight decay.
        numbers: See the constants of this module; shape ``(NUMBERS,)``.
    """
    widest = 0 if backup_difference is None else TILE
    for p in range(parts.shape[0]):
        if backup_difference is not None:
            rows, columns = parts[p, 3], parts[p, 4]
            widest = max(widest, rows if columns == 1 else (rows - 1) * columns + min(columns, TILE))
    held, scratch = np.empty(widest, np.float32), np.empty((7, TILE), np.float32)
    for p in range(parts.shape[0]):
        start, first, blocks, rows, columns = parts[p, 0], parts[p, 1], parts[p, 2], parts[p, 3], parts[p, 4]
        # A vector is handled as tiles of whole blocks, a matrix as tiles of columns.
        vector = columns == 1
        tile = max(1, TILE // rows) if vector else TILE
        along = blocks if vector else columns
        stride = rows if vector else columns
        for outer in range(1 if vector else blocks):
            for left in range(0, along, tile):
                count = min(tile, along - left)
                block = first + outer * columns + left
                begin = start + (left * rows if vector else outer * rows * columns + left)
                end = begin + (count * rows if vector else (rows - 1) * columns + count)
                square = step_square[block : block + count]
                products, shared, drifts = scratch[0, :count], scratch[1, :count], scratch[2, :count]
                sizes, factor = scratch[3, :count], scratch[4, :count]
                decay, steps = scratch[5, :count], scratch[6, :count]
                g, w, r, out = gradient[begin:end], weights[begin:end], reserve[begin:end], reply[begin:end]
                if backup_difference is None:
                    b = backup[begin:end]
                else:
                    b = held[: end - begin]
                    lines, length = (1, end - begin) if vector else (rows, count)
                    _widen(lines, stride, length, backup[begin:end], backup_difference[begin:end], b)
                if vector and rows == 16:
                    _sums_of_16(g, w, b, products, shared, drifts, sizes)
                elif vector:
                    _sums_of_blocks(rows, g, w, b, products, shared, drifts, sizes)
                else:
                    _sums_of_columns(rows, stride, g, w, b, products, shared, drifts, sizes)
                _factors(square, products, shared, drifts, sizes, factor, numbers)
                _decays(block, count, factor_mean, factor_square, factor, decay, numbers)
                if second is not None:
                    if vector:
                        _adam_blocks(rows, g, w, r, second[begin:end], out, steps, factor, decay, numbers)
                    else:
                        _adam_columns(rows, stride, g, w, r, second[begin:end], out, steps, factor, decay, numbers)
                elif vector and rows == 16:
                    _sgd_16(g, w, r, out, steps, factor, decay, numbers)
                elif vector:
                    _sgd_blocks(rows, g, w, r, out, steps, factor, decay, numbers)
                else:
                    _sgd_columns(rows, stride, g, w, r, out, steps, factor, decay, numbers)
                if reply_anchor is not None:
                    lines, length = (1, end - begin) if vector else (rows, count)
                    _narrow(lines, stride, length, out, reply_anchor[begin:end], reply_difference[begin:end])
                _average_steps(square, steps)


@reordered
def narrow(reply: Any, anchor: Any, difference: Any) -> None:
    """Round ``reply`` to the nearest sum of ``anchor`` and a bfloat16, and write that as its upper half, uint16."""
    _narrow(1, reply.size, reply.size, reply, anchor, difference)


@reordered
def widen(anchor: Any, difference: Any, out: Any) -> None:
    """Write the sum of ``anchor`` and the difference that :func:`narrow` wrote."""
    _widen(1, out.size, out.size, anchor, difference, out)


# ---- sums and factors


@reordered
def _sums_of_columns(
    rows: Any,
    stride: Any,
    gradient: Any,
    weights: Any,
    backup: Any,
    products: Any,
    shared: Any,
    drifts: Any,
    sizes: Any,
) -> None:
    for c in range(products.size):
        products[c], shared[c], drifts[c], sizes[c] = _ZERO, _ZERO, _ZERO, _ZERO
    for row in range(rows):
        at = row * stride
        g, w = gradient[at : at + products.size], weights[at : at + products.size]
        b = backup[at : at + products.size]
        for c in range(products.size):
            drift = w[c] - b[c]
            products[c] += g[c] * g[c]
            shared[c] += g[c] * drift
            drifts[c] += drift * drift
            sizes[c] += w[c] * w[c]


@reordered
def _sums_of_blocks(
    rows: Any, gradient: Any, weights: Any, backup: Any, products: Any, shared: Any, drifts: Any, sizes: Any
) -> None:
    for block in range(products.size):
        at = block * rows
        g, w, b = gradient[at : at + rows], weights[at : at + rows], backup[at : at + rows]
        own, common, moved, size = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(rows):
            drift = w[i] - b[i]
            own += g[i] * g[i]
            common += g[i] * drift
            moved += drift * drift
            size += w[i] * w[i]
        products[block], shared[block], drifts[block], sizes[block] = own, common, moved, size


@reordered
def _sums_of_16(gradient: Any, weights: Any, backup: Any, products: Any, shared: Any, drifts: Any, sizes: Any) -> None:
    for block in range(products.size):
        at = block * 16
        g, w, b = gradient[at : at + 16], weights[at : at + 16], backup[at : at + 16]
        own, common, moved, size = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(16):
            drift = w[i] - b[i]
            own += g[i] * g[i]
            common += g[i] * drift
            moved += drift * drift
            size += w[i] * w[i]
        products[block], shared[block], drifts[block], sizes[block] = own, common, moved, size


@reordered
def _factors(square: Any, products: Any, shared: Any, drifts: Any, sizes: Any, factor: Any, numbers: Any) -> None:
    strength, clip, gap = numbers[LAMBDA], numbers[CLIP], numbers[GAP]
    for c in range(square.size):
        typical = np.sqrt(square[c]) + _STEP_EPSILON
        change = strength * shared[c] / (np.sqrt(products[c]) * typical + _NORM_EPSILON)
        change = min(max(change, -clip), clip)
        harmless = typical + _WEIGHT_SHARE * np.sqrt(sizes[c])
        factor[c] = (_ONE + change) / (_ONE + gap * np.sqrt(drifts[c]) / harmless)


@reordered
def _decays(
    block: Any, count: Any, factor_mean: Any, factor_square: Any, factor: Any, decay: Any, numbers: Any
) -> None:
    """Update the mean factors of some blocks, and write what the decay of their weights is multiplied with."""
    share = numbers[SHARE]
    for c in range(decay.size):
        decay[c] = _ZERO
    if factor_mean is not None:
        mean = factor_mean[block : block + count]
        for c in range(decay.size):
            mean[c] += share * (factor[c] - mean[c])
            decay[c] = mean[c]
    if factor_square is not None:
        mean_square = factor_square[block : block + count]
        for c in range(decay.size):
            mean_square[c] += share * (factor[c] * factor[c] - mean_square[c])
            decay[c] /= np.sqrt(mean_square[c]) + _NORM_EPSILON


@reordered
def _average_steps(square: Any, steps: Any) -> None:
    for c in range(square.size):
        square[c] = _normal(_STEP_DECAY * square[c] + _STEP_SHARE * steps[c])


@reordered
def _normal(x: Any) -> Any:
    """Return 0 for a subnormal number: means of zeros would stay subnormal for ever, and some processors are slow."""
    return x if abs(x) >= _SMALLEST else _ZERO


# ---- one element: weights, reserve (and second moment) after the step, the reply, the step


@reordered
def _sgd(g: Any, w: Any, r: Any, at_once: Any, later: Any, decay: Any, decay_ahead: Any, shares: Any) -> Any:
    kept, released, ahead = shares
    step = released * r + at_once * g + decay * w
    r = _normal(kept * r + later * g)
    w = w - step
    return w, r, w - ahead * r - decay_ahead * w, step


@reordered
def _adam(g: Any, w: Any, r: Any, v: Any, decay: Any, decay_ahead: Any, shares: Any) -> Any:
    kept, released, ahead, rate, at_once, later, beta_2, second_share, epsilon = shares
    v = _normal(beta_2 * v + second_share * g * g)
    share = _ONE / (np.sqrt(v) + epsilon)
    step = rate * (released * r + at_once * g) * share + decay * w
    r = _normal(kept * r + later * g)
    w = w - step
    return w, r, v, w - ahead * r * share - decay_ahead * w, step


@reordered
def _sgd_shares(numbers: Any) -> Any:
    return numbers[KEPT], numbers[RELEASED], numbers[AHEAD]


@reordered
def _adam_shares(numbers: Any) -> Any:
    own = (numbers[RATE], numbers[AT_ONCE], numbers[LATER], numbers[BETA_2], numbers[SECOND_SHARE], numbers[EPSILON])
    return numbers[KEPT], numbers[RELEASED], numbers[AHEAD], *own


# ---- tiles of columns, and of blocks


@reordered
def _sgd_columns(
    rows: Any,
    stride: Any,
    gradient: Any,
    weights: Any,
    reserve: Any,
    reply: Any,
    steps: Any,
    factor: Any,
    decay: Any,
    numbers: Any,
) -> None:
    shares, at_once, later = _sgd_shares(numbers), numbers[RATE] * numbers[AT_ONCE], numbers[RATE] * numbers[LATER]
    decay_rate, decay_ahead = numbers[DECAY_RATE], numbers[DECAY_AHEAD]
    for c in range(steps.size):
        steps[c] = _ZERO
    for row in range(rows):
        at, end = row * stride, row * stride + steps.size
        g, w, r, out = gradient[at:end], weights[at:end], reserve[at:end], reply[at:end]
        for c in range(steps.size):
            f, d = factor[c], decay[c]
            w[c], r[c], out[c], step = _sgd(
                g[c], w[c], r[c], at_once * f, later * f, decay_rate * d, decay_ahead * d, shares
            )
            steps[c] += step * step


@reordered
def _sgd_blocks(
    rows: Any, gradient: Any, weights: Any, reserve: Any, reply: Any, steps: Any, factor: Any, decay: Any, numbers: Any
) -> None:
    shares, at_once, later = _sgd_shares(numbers), numbers[RATE] * numbers[AT_ONCE], numbers[RATE] * numbers[LATER]
    decay_rate, decay_ahead = numbers[DECAY_RATE], numbers[DECAY_AHEAD]
    for block in range(steps.size):
        at, end = block * rows, (block + 1) * rows
        g, w, r, out = gradient[at:end], weights[at:end], reserve[at:end], reply[at:end]
        now, then = at_once * factor[block], later * factor[block]
        lost, lost_ahead, total = decay_rate * decay[block], decay_ahead * decay[block], _ZERO
        for i in range(rows):
            w[i], r[i], out[i], step = _sgd(g[i], w[i], r[i], now, then, lost, lost_ahead, shares)
            total += step * step
        steps[block] = total


@reordered
def _sgd_16(
    gradient: Any, weights: Any, reserve: Any, reply: Any, steps: Any, factor: Any, decay: Any, numbers: Any
) -> None:
    shares, at_once, later = _sgd_shares(numbers), numbers[RATE] * numbers[AT_ONCE], numbers[RATE] * numbers[LATER]
    decay_rate, decay_ahead = numbers[DECAY_RATE], numbers[DECAY_AHEAD]
    for block in range(steps.size):
        at, end = block * 16, block * 16 + 16
        g, w, r, out = gradient[at:end], weights[at:end], reserve[at:end], reply[at:end]
        now, then = at_once * factor[block], later * factor[block]
        lost, lost_ahead, total = decay_rate * decay[block], decay_ahead * decay[block], _ZERO
        for i in range(16):
            w[i], r[i], out[i], step = _sgd(g[i], w[i], r[i], now, then, lost, lost_ahead, shares)
            total += step * step
        steps[block] = total


@reordered
def _adam_columns(
    rows: Any,
    stride: Any,
    gradient: Any,
    weights: Any,
    reserve: Any,
    second: Any,
    reply: Any,
    steps: Any,
    factor: Any,
    decay: Any,
    numbers: Any,
) -> None:
    shares, decay_rate, decay_ahead = _adam_shares(numbers), numbers[DECAY_RATE], numbers[DECAY_AHEAD]
    for c in range(steps.size):
        steps[c] = _ZERO
    for row in range(rows):
        at, end = row * stride, row * stride + steps.size
        g, w, r, v, out = gradient[at:end], weights[at:end], reserve[at:end], second[at:end], reply[at:end]
        for c in range(steps.size):
            f, d = factor[c], decay[c]
            w[c], r[c], v[c], out[c], step = _adam(f * g[c], w[c], r[c], v[c], decay_rate * d, decay_ahead * d, shares)
            steps[c] += step * step


@reordered
def _adam_blocks(
    rows: Any,
    gradient: Any,
    weights: Any,
    reserve: Any,
    second: Any,
    reply: Any,
    steps: Any,
    factor: Any,
    decay: Any,
    numbers: Any,
) -> None:
    shares, decay_rate, decay_ahead = _adam_shares(numbers), numbers[DECAY_RATE], numbers[DECAY_AHEAD]
    for block in range(steps.size):
        at, end = block * rows, (block + 1) * rows
        g, w, r, v, out = gradient[at:end], weights[at:end], reserve[at:end], second[at:end], reply[at:end]
        f, lost, lost_ahead, total = factor[block], decay_rate * decay[block], decay_ahead * decay[block], _ZERO
        for i in range(rows):
            w[i], r[i], v[i], out[i], step = _adam(f * g[i], w[i], r[i], v[i], lost, lost_ahead, shares)
            total += step * step
        steps[block] = total


# ---- backups relative to an anchor


@reordered
def _widen(rows: Any, stride: Any, length: Any, anchors: Any, differences: Any, weights: Any) -> None:
    for row in range(rows):
        at, end = row * stride, row * stride + length
        anchor, difference, out = anchors[at:end], differences[at:end], weights[at:end]
        bits = out.view(np.uint32)
        for c in range(length):
            bits[c] = np.uint32(difference[c]) << np.uint32(16)
        for c in range(length):
            out[c] = anchor[c] + out[c]


@reordered
def _narrow(rows: Any, stride: Any, length: Any, weights: Any, anchors: Any, differences: Any) -> None:
    for row in range(rows):
        at, end = row * stride, row * stride + length
        reply, anchor, difference = weights[at:end], anchors[at:end], differences[at:end]
        bits = reply.view(np.uint32)
        for c in range(length):
            reply[c] -= anchor[c]
        for c in range(length):
            upper = (bits[c] + np.uint32(0x7FFF) + ((bits[c] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            difference[c] = np.uint16(upper)
            bits[c] = upper << np.uint32(16)
        for c in range(length):
            reply[c] = anchor[c] + reply[c]

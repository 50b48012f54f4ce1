"""Uniform and normal float32 numbers from 32-bit words, by additions and products alone.

They are equal on every machine, and in the compiled kernels, which do the same steps. The
polynomials for logarithm, sine and cosine are those of the Cephes library (Stephen L. Moshier,
``logf.c``, ``sinf.c``), correct to one unit of the last place. A GPU computes the logarithm as
exactly, and sine and cosine by a fast instruction with an absolute error of at most 2**-20.5 (PTX
ISA, ``sin.approx.ftz.f32``). A normal number here therefore differs from a GPU's by at most 5e-6,
which is that error times the largest radius, 6.8.
"""

from __future__ import annotations

from typing import Any

import numpy

from torchdevice.random_numbers.scratch import Scratch

_F = numpy.float32

_FLOAT32, _FLOAT64 = numpy.dtype(_F), numpy.dtype(numpy.float64)
_INT32, _UINT32 = numpy.dtype(numpy.int32), numpy.dtype(numpy.uint32)


def _constant(value: float) -> Any:
    # NumPy takes an array without dimensions in less time than one of its scalars.
    return numpy.array(value, _F)


def _integer(value: int) -> Any:
    return numpy.array(value, numpy.int32)


_TO_UNIT, _HALF_UNIT = _constant(2.0**-32), _constant(2.0**-33)
"""``CURAND_2POW32_INV`` and its half."""

_TURN = float(_F(6.2831855))
_TO_ANGLE, _HALF_ANGLE = numpy.array(2.0**-32 * _TURN), numpy.array(2.0**-33 * _TURN)
"""``CURAND_2POW32_INV_2PI`` and its half, in float64."""

_LOGARITHM = tuple(
    map(
        _constant,
        (
            *(
                7.0376836292e-2,
                -1.1514610310e-1,
                1.1676998740e-1,
                -1.2420140846e-1,
                1.4249322787e-1,
            ),
            *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
        ),
    )
)
_SINE = tuple(map(_constant, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)))
_COSINE = tuple(map(_constant, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)))
_QUARTERS = tuple(map(_constant, (0.78515625, 2.4187564849853515625e-4, 3.77489497744594108e-8)))
"""An eighth of a turn, in three parts that multiply exactly."""

_TO_OCTANTS = _constant(1.2732395)

_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_OF_EXPONENT = tuple(_constant(each * _F(2.0**-23)) for each in (_LN2_LOW, _LN2_HIGH))
"""The logarithm of 2 in two parts, for an exponent in the place that it has in a number's bits."""

_ONE, _HALF, _MINUS_TWO = map(_constant, (1.0, 0.5, -2.0))

_BITS_OF_ROOT = _integer(int(_F(0.70710677).view(numpy.int32)))
"""The bits of the root of a half."""

_EXPONENT = _integer(-1 << 23)
"""The sign and the exponent of a number's bits."""

_NEXT, _EVEN, _QUADRANT, _THIRD = map(_integer, (1, -2, 2, 4))
_TO_SIGN_OF_SECOND, _TO_SIGN_OF_THIRD, _TO_ALL = map(_integer, (30, 29, 31))


def narrow(words: Any, room: Scratch) -> Any:
    """Return the lower halves of 64 bits."""
    found = room.array(len(words), _UINT32)
    numpy.copyto(found, words, casting="unsafe")
    return found


def _floats(integers: Any, room: Scratch) -> Any:
    found = room.array(len(integers), _FLOAT32)
    numpy.copyto(found, integers, casting="unsafe")
    return found


def uniform(words: Any, room: Scratch) -> Any:
    """Return numbers in (0, 1], as ``curand_uniform``, of the lower halves of 64 bits."""
    found = _floats(narrow(words, room), room)
    found *= _TO_UNIT
    found += _HALF_UNIT
    return found


def normal(first: Any, second: Any, wanted: int, room: Scratch) -> list[Any]:
    """Return normal numbers by ``_curand_box_muller``: radius times sine, and times cosine."""
    sine, cosine = (room.array(len(first), _FLOAT32) for _ in range(2))
    start = room.used
    radius = logarithm(uniform(first, room), room)
    radius *= _MINUS_TWO
    numpy.sqrt(radius, out=radius)
    # The multiplication and the addition are one instruction on a GPU, and round once.
    angle = room.array(len(second), _FLOAT64)
    numpy.copyto(angle, _floats(narrow(second, room), room))
    angle *= _TO_ANGLE
    angle += _HALF_ANGLE
    _sine_and_cosine(_floats(angle, room), sine, cosine, room)
    sine *= radius
    if wanted > 1:
        cosine *= radius
    room.used = start
    return [sine, cosine]


def logarithm(x: Any, room: Scratch) -> Any:
    """Return the natural logarithm of normal numbers above 0."""
    found = room.array(len(x), _FLOAT32)
    start, bits = room.used, x.view(numpy.int32)
    # The power of two that leaves a number from the root of a half to the root of two.
    power = numpy.subtract(bits, _BITS_OF_ROOT, out=room.array(len(x), _INT32))
    power &= _EXPONENT
    exponent = _floats(power, room)
    numpy.subtract(bits, power, out=power)
    mantissa = power.view(_F)
    mantissa -= _ONE
    square, spare = (room.array(len(x), _FLOAT32) for _ in range(2))
    numpy.multiply(mantissa, mantissa, square)
    _polynomial(_LOGARITHM, mantissa, found)
    found *= mantissa
    found *= square
    found += numpy.multiply(exponent, _OF_EXPONENT[0], spare)
    square *= _HALF
    found -= square
    found += mantissa
    exponent *= _OF_EXPONENT[1]
    found += exponent
    room.used = start
    return found


def _sine_and_cosine(x: Any, sine: Any, cosine: Any, room: Scratch) -> None:
    """Write sine and cosine of angles from 0 to 2 pi, and write to the angles."""
    spare, octant = room.array(len(x), _FLOAT32), room.array(len(x), _INT32)
    numpy.copyto(octant, numpy.multiply(x, _TO_OCTANTS, spare), casting="unsafe")
    octant += _NEXT
    octant &= _EVEN
    turned = _floats(octant, room)
    for part in _QUARTERS:
        x -= numpy.multiply(turned, part, spare)
    square = numpy.multiply(x, x, spare)
    _polynomial(_SINE, square, sine)
    sine *= square
    sine *= x
    sine += x
    _polynomial(_COSINE, square, cosine)
    cosine *= square
    cosine *= square
    square *= _HALF
    cosine -= square
    cosine += _ONE
    sines, cosines = sine.view(numpy.int32), cosine.view(numpy.int32)
    # The two change places in odd quadrants, those with the second bit.
    change, both = turned.view(numpy.int32), spare.view(numpy.int32)
    numpy.left_shift(octant, _TO_SIGN_OF_SECOND, change)
    change >>= _TO_ALL
    change &= numpy.bitwise_xor(sines, cosines, both)
    sines ^= change
    cosines ^= change
    # The sign bit: of the sine in quadrants three and four, of the cosine in two and three.
    sines ^= _third_bit_to_sign(octant, both)
    octant += _QUADRANT
    cosines ^= _third_bit_to_sign(octant, both)


def _third_bit_to_sign(octant: Any, out: Any) -> Any:
    numpy.bitwise_and(octant, _THIRD, out)
    out <<= _TO_SIGN_OF_THIRD
    return out


def _polynomial(coefficients: tuple[Any, ...], x: Any, out: Any) -> None:
    numpy.multiply(x, coefficients[0], out)
    for each in coefficients[1:-1]:
        out += each
        out *= x
    out += coefficients[-1]

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

_F = numpy.float32

_TO_UNIT, _HALF_UNIT = _F(2.0**-32), _F(2.0**-33)
"""``CURAND_2POW32_INV`` and its half."""

_TO_ANGLE, _HALF_ANGLE = _F(2.0**-32) * _F(6.2831855), _F(2.0**-33) * _F(6.2831855)
"""``CURAND_2POW32_INV_2PI`` and its half."""

_LOGARITHM = tuple(
    map(
        _F,
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
_SINE = tuple(map(_F, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)))
_COSINE = tuple(map(_F, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)))
_QUARTERS = tuple(map(_F, (0.78515625, 2.4187564849853515625e-4, 3.77489497744594108e-8)))
"""An eighth of a turn, in three parts that multiply exactly."""

_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)

_ONE, _HALF = _F(1), _F(0.5)

_BITS_OF_ONE, _BITS_OF_ROOT = (int(_F(value).view(numpy.int32)) for value in (1.0, 0.70710677))
"""The bits of 1 and of the root of a half."""


def uniform(words: Any) -> Any:
    """Return numbers in (0, 1], as ``curand_uniform``."""
    # By way of signed integers, which NumPy converts faster. The words have 32 bits.
    found = words.view(numpy.int64).astype(_F)
    found *= _TO_UNIT
    found += _HALF_UNIT
    return found


def normal(first: Any, second: Any) -> tuple[Any, Any]:
    """Return two normal numbers by ``_curand_box_muller``: radius times sine, and times cosine."""
    radius = logarithm(uniform(first))
    radius *= _F(-2)
    numpy.sqrt(radius, out=radius)
    # The multiplication and the addition are one instruction on a GPU, and round once.
    angle = second.view(numpy.int64).astype(_F).astype(numpy.float64)
    angle *= numpy.float64(_TO_ANGLE)
    angle += numpy.float64(_HALF_ANGLE)
    sine, cosine = sine_and_cosine(angle.astype(_F))
    sine *= radius
    cosine *= radius
    return sine, cosine


def logarithm(x: Any) -> Any:
    """Return the natural logarithm of normal numbers above 0."""
    bits = x.view(numpy.int32)
    # The power of two that leaves a number from the root of a half to the root of two.
    power = ((bits + (_BITS_OF_ONE - _BITS_OF_ROOT)) >> 23) - 127
    exponent = power.astype(_F)
    power <<= 23
    mantissa = (bits - power).view(_F)
    mantissa -= _ONE
    square = mantissa * mantissa
    found = _polynomial(_LOGARITHM, mantissa)
    found *= mantissa
    found *= square
    found += exponent * _LN2_LOW
    found -= square * _HALF
    found += mantissa
    found += exponent * _LN2_HIGH
    return found


def sine_and_cosine(x: Any) -> tuple[Any, Any]:
    """Return sine and cosine of angles from 0 to 2 pi."""
    octant = (x * _F(1.2732395)).astype(numpy.int32)
    octant += 1
    octant &= -2
    turned = octant.astype(_F)
    rest = x - turned * _QUARTERS[0]
    for part in _QUARTERS[1:]:
        rest -= turned * part
    square = rest * rest
    sine = _polynomial(_SINE, square)
    sine *= square
    sine *= rest
    sine += rest
    cosine = _polynomial(_COSINE, square)
    cosine *= square
    cosine *= square
    cosine -= square * _HALF
    cosine += _ONE
    quadrant = octant >> 1
    sines, cosines = sine.view(numpy.int32), cosine.view(numpy.int32)
    # The two change places in odd quadrants.
    change = sines ^ cosines
    change &= -(quadrant & 1)
    sines ^= change
    cosines ^= change
    # The sign bit: of the sine in quadrants three and four, of the cosine in two and three.
    sines ^= (quadrant & 2) << 30
    cosines ^= ((quadrant + 1) & 2) << 30
    return sine, cosine


def _polynomial(coefficients: tuple[Any, ...], x: Any) -> Any:
    found = x * coefficients[0]
    for each in coefficients[1:-1]:
        found += each
        found *= x
    found += coefficients[-1]
    return found

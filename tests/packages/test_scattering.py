"""torch_scatter, torch_sparse and MultiScaleDeformableAttention against loops over definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import torchdevice
from torchdevice.errors import NotSupportedError

pytestmark = pytest.mark.one_engine

Reduction = Callable[[torch.Tensor], torch.Tensor]
"""What becomes of the elements (elements, ...) of one index."""

REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda x: x.sum(0),
    "add": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "mul": lambda x: x.prod(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
}

INDEX = [3, 0, 0, 5, 3, 3, 0]
"""No element has the index 1, 2 or 4."""


@pytest.fixture(params=["cpu", "simulated:a100", "simulated:mps"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A scope on each target, and the widest dtype that it has."""
    with torchdevice.portable(target=request.param):
        yield torch.float32 if request.param == "simulated:mps" else torch.float64


def elements(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return x.to("cuda").requires_grad_()


def by_loop(x: torch.Tensor, index: list[int], size: int, reduce: Reduction, none: float) -> Any:
    """Return the reduction of the elements along the first dimension that have each index."""
    rows = []
    for place in range(size):
        chosen = [row for row, each in zip(x.cpu(), index, strict=True) if each == place]
        empty = x.new_full(x.shape[1:], none).cpu()
        rows.append(reduce(torch.stack(chosen)) if chosen else empty)
    return torch.stack(rows)


def check(found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    """Compare values, and the gradients of x."""
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    factor = torch.linspace(1, 2, expected.numel(), dtype=expected.dtype).view_as(expected)
    (ours,) = torch.autograd.grad((found * factor.to(found.device)).sum(), x)
    (theirs,) = torch.autograd.grad((expected * factor).sum(), x)
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-5, atol=1e-6)


class TestScatter:
    @pytest.mark.parametrize("reduce", REDUCTIONS)
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_by_index(self, dtype: torch.dtype, reduce: str, dim: int) -> None:
        from torch_scatter import scatter

        x = elements(dtype, *((7, 3) if dim == 0 else (3, 7)))
        index = torch.tensor(INDEX, device="cuda")
        first = x if dim == 0 else x.T
        none = 1.0 if reduce == "mul" else 0.0
        expected = by_loop(first, INDEX, 6, REDUCTIONS[reduce], none)
        found = scatter(x, index, dim, reduce=reduce)
        check(found, expected if dim == 0 else expected.T, x)
        wider = scatter(x, index, dim, dim_size=8, reduce=reduce)
        assert wider.shape[dim] == 8 and torch.equal(wider.narrow(dim, 0, 6), found)
        assert (wider.narrow(dim, 6, 2) == none).all()

    @pytest.mark.parametrize("name", ["min", "max"])
    def test_the_place_of_an_extreme_is_the_first(self, dtype: torch.dtype, name: str) -> None:
        import torch_scatter

        x = torch.tensor([1, 2, 2, 5, 1, 1, 2], dtype=dtype, device="cuda")
        values, places = getattr(torch_scatter, f"scatter_{name}")(
            x, torch.tensor(INDEX, device="cuda")
        )
        assert values.tolist() == [2, 0, 0, 1, 0, 5] and places.tolist() == [1, 7, 7, 0, 7, 3]

    def test_what_out_has_counts(self, dtype: torch.dtype) -> None:
        from torch_scatter import scatter_add, scatter_max, scatter_mean, scatter_mul

        x = torch.tensor([1.0, 2.0, 3.0], dtype=dtype, device="cuda")
        index = torch.tensor([0, 0, 1], device="cuda")
        expected = {scatter_add: [13, 13], scatter_mul: [20, 30], scatter_mean: [6.5, 13]}
        for function, result in expected.items():
            out = torch.full((2,), 10.0, dtype=dtype, device="cuda")
            assert function(x, index, out=out) is out and out.tolist() == result
        out = torch.tensor([10.0, 0.0], dtype=dtype, device="cuda")
        values, places = scatter_max(x, index, out=out)
        assert values is out and out.tolist() == [10, 3] and places.tolist() == [3, 2]

    def test_integers_are_divided_downwards(self) -> None:
        with torchdevice.portable("cpu"):
            from torch_scatter import scatter_mean

            x = torch.tensor([-1, -2, 5], device="cuda")
            assert scatter_mean(x, torch.tensor([0, 0, 1])).tolist() == [-2, 5]

    def test_an_unknown_reduction(self) -> None:
        with torchdevice.portable("cpu"):
            from torch_scatter import scatter, segment_csr

            x = torch.ones(2)
            with pytest.raises(ValueError, match="reduce='median' is not known"):
                scatter(x, torch.tensor([0, 0]), reduce="median")
            with pytest.raises(ValueError, match="reduce='mul' is not known"):
                segment_csr(x, torch.tensor([0, 2]), reduce="mul")

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
    def test_nothing(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        from torch_scatter import scatter, scatter_min

        x = elements(dtype, *shape)
        index = torch.empty(shape[0], dtype=torch.long, device="cuda").fill_(1)
        # The package counts the elements, of which there are none.
        assert scatter(x, index, 0).shape == (0, *shape[1:])
        assert scatter_min(x, index, 0)[1].shape == (0, *shape[1:])


class TestSegments:
    @pytest.mark.parametrize("reduce", [name for name in REDUCTIONS if name != "mul"])
    def test_both_forms(self, dtype: torch.dtype, reduce: str) -> None:
        from torch_scatter import segment_coo, segment_csr

        x, index = elements(dtype, 7, 3), sorted(INDEX)

        def expected() -> torch.Tensor:
            return by_loop(x, index, 6, REDUCTIONS[reduce], 0.0)

        starts = [sum(each < place for each in index) for place in range(7)]
        pointers = torch.tensor(starts, device="cuda")
        check(segment_csr(x, pointers, reduce=reduce), expected(), x)
        check(segment_coo(x, torch.tensor(index, device="cuda"), reduce=reduce), expected(), x)

    def test_segments_of_each_row(self, dtype: torch.dtype) -> None:
        from torch_scatter import gather_csr, segment_csr

        x = torch.arange(10, dtype=dtype, device="cuda").view(2, 5)
        pointers = torch.tensor([[1, 2, 5], [0, 4, 5]], device="cuda")
        assert segment_csr(x, pointers).tolist() == [[1, 9], [26, 9]]
        whole = torch.tensor([[0, 2, 5], [0, 4, 5]], device="cuda")
        assert gather_csr(x[:, :2], whole).tolist() == [[0, 0, 1, 1, 1], [5, 5, 5, 5, 6]]

    def test_gathering_undoes_a_sum(self, dtype: torch.dtype) -> None:
        from torch_scatter import gather_coo, segment_add_coo

        x = elements(dtype, 4, 2)
        index = torch.tensor([0, 1, 1, 3], device="cuda")
        check(gather_coo(x, index), x.cpu()[[0, 1, 1, 3]], x)
        assert segment_add_coo(x, index, dim_size=5).shape == (5, 2)


class TestCompositions:
    @pytest.mark.parametrize(
        ("name", "reduce"),
        [
            ("scatter_logsumexp", lambda x: x.logsumexp(0)),
            (
                "scatter_std",
                lambda x: ((x - x.mean(0)).square().sum(0) / max(len(x) - 1, 1)).sqrt(),
            ),
        ],
    )
    def test_reductions(self, dtype: torch.dtype, name: str, reduce: Reduction) -> None:
        import torch_scatter

        x = elements(dtype, 7, 3)
        found = getattr(torch_scatter, name)(x, torch.tensor(INDEX, device="cuda"), 0)
        expected = by_loop(x, INDEX, 6, reduce, 0.0)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", ["softmax", "log_softmax"])
    def test_softmax(self, dtype: torch.dtype, name: str) -> None:
        import torch_scatter

        x = elements(dtype, 7, 3)
        found = getattr(torch_scatter, f"scatter_{name}")(x, torch.tensor(INDEX, device="cuda"), 0)
        host, expected = x.cpu(), torch.empty(7, 3, dtype=dtype)
        expected = host.clone()
        for place in set(INDEX):
            rows = [row for row, each in enumerate(INDEX) if each == place]
            expected[rows] = getattr(functional, name)(host[rows], 0)
        check(found, expected, x)

    def test_of_integers_they_are_refused(self) -> None:
        with torchdevice.portable("cpu"):
            from torch_scatter import scatter_softmax

            with pytest.raises(ValueError, match="floating point data types"):
                scatter_softmax(torch.tensor([1, 2]), torch.tensor([0, 0]))


class TestSparse:
    def test_products_and_order(self, dtype: torch.dtype) -> None:
        import torch_sparse

        index = torch.tensor([[2, 0, 2, 1], [1, 3, 1, 0]], device="cuda")
        value = elements(dtype, 4)
        dense = torch.zeros(3, 4, dtype=dtype, device="cuda")
        dense = dense.index_put((index[0], index[1]), value, accumulate=True)
        places, summed = torch_sparse.coalesce(index, value, 3, 4)
        assert places.tolist() == [[0, 1, 2], [3, 0, 1]]
        torch.testing.assert_close(summed, torch.stack([value[1], value[3], value[0] + value[2]]))
        turned, others = torch_sparse.transpose(index, value, 3, 4)
        assert turned.tolist() == [[0, 1, 3], [1, 2, 0]] and len(others) == 3
        matrix = elements(dtype, 4, 2).detach()
        check(torch_sparse.spmm(index, value, 3, 4, matrix), (dense @ matrix).cpu(), value)
        product, numbers = torch_sparse.spspmm(turned, others, places, summed, 4, 3, 4)
        whole = torch.zeros(4, 4, dtype=dtype, device="cuda")
        whole[product[0], product[1]] = numbers.detach()
        torch.testing.assert_close(whole, (dense.T @ dense).detach())

    def test_a_sparse_tensor_is_refused_by_name(self) -> None:
        with torchdevice.portable("cpu"):
            import torch_sparse

            with pytest.raises(NotSupportedError, match=r"torch_sparse\.SparseTensor"):
                torch_sparse.SparseTensor(row=None)


def interpolated(cells: torch.Tensor, x: float, y: float) -> torch.Tensor:
    """Return what stands between the four cells around a point of a map (height, width, ...)."""
    height, width = cells.shape[:2]
    column, row = x * width - 0.5, y * height - 0.5
    total = torch.zeros_like(cells[0, 0])
    for i in (math.floor(row), math.floor(row) + 1):
        for j in (math.floor(column), math.floor(column) + 1):
            if 0 <= i < height and 0 <= j < width:
                total = total + cells[i, j] * (1 - abs(row - i)) * (1 - abs(column - j))
    return total


class TestDeformableAttention:
    SIZES = ((3, 4), (2, 2))

    def given(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return values, sizes, beginnings, points and weights: 2 heads, 3 queries, 2 points."""
        sizes = torch.tensor(self.SIZES, device="cuda")
        starts = torch.tensor([0, 12], device="cuda")
        value = elements(dtype, 1, 16, 2, 3)
        points = elements(dtype, 1, 3, 2, 2, 2, 2).detach().sigmoid()
        weights = elements(dtype, 1, 3, 2, 2, 2).detach().softmax(-1)
        return value, sizes, starts, points, weights

    def test_against_a_loop(self, dtype: torch.dtype) -> None:
        import MultiScaleDeformableAttention as attention

        value, sizes, starts, points, weights = self.given(dtype)
        found = attention.ms_deform_attn_forward(value, sizes, starts, points, weights, 64)
        host, places, factors = value.cpu()[0], points.cpu()[0], weights.cpu()[0]
        expected = torch.zeros(3, 2, 3, dtype=dtype)
        for query in range(3):
            for head in range(2):
                for level, (first, (height, width)) in enumerate(
                    zip((0, 12), self.SIZES, strict=True)
                ):
                    cells = host[first : first + height * width, head].view(height, width, 3)
                    for point in range(2):
                        x, y = places[query, head, level, point].tolist()
                        read = interpolated(cells, x, y) * factors[query, head, level, point]
                        expected[query, head] += read.detach()
        torch.testing.assert_close(found.cpu()[0], expected.flatten(1), rtol=1e-4, atol=1e-5)

    def test_the_backward_pass_is_that_of_the_forward_pass(self) -> None:
        with torchdevice.portable("cpu"):
            import MultiScaleDeformableAttention as attention

            value, sizes, starts, points, weights = self.given(torch.float64)
            given = [each.detach() for each in (value, points, weights)]
            grad = elements(torch.float64, 1, 3, 6).detach()

            def total(value: Any, points: Any, weights: Any) -> torch.Tensor:
                out = attention.ms_deform_attn_forward(value, sizes, starts, points, weights, 64)
                return (out * grad).sum()

            found = attention.ms_deform_attn_backward(
                given[0], sizes, starts, given[1], given[2], grad, 64
            )
            for place, gradient in enumerate(found):
                step = torch.zeros_like(given[place])
                step.view(-1)[5] = 1e-6
                above, below = list(given), list(given)
                above[place], below[place] = given[place] + step, given[place] - step
                slope = (total(*above) - total(*below)) / 2e-6
                torch.testing.assert_close(gradient.flatten()[5], slope, rtol=1e-4, atol=1e-6)

    def test_a_batch_that_does_not_divide_is_refused_on_a_gpu(self) -> None:
        for target, refused in (("simulated:a100", True), ("cpu", False)):
            with torchdevice.portable(target=target):
                import MultiScaleDeformableAttention as attention

                value, sizes, starts, points, weights = self.given(torch.float32)
                three = [
                    each.expand(3, *each.shape[1:]).contiguous()
                    for each in (value, points, weights)
                ]
                if refused:
                    with pytest.raises(
                        RuntimeError, match=r"batch\(3\) must divide im2col_step\(2\)"
                    ):
                        attention.ms_deform_attn_forward(
                            three[0], sizes, starts, three[1], three[2], 2
                        )
                    continue
                out = attention.ms_deform_attn_forward(
                    three[0], sizes, starts, three[1], three[2], 2
                )
                assert out.shape == (3, 3, 6)

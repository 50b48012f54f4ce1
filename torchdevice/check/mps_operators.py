"""Public functions and modules of torch that need an operator without a kernel on MPS.

Made by ``python docs/make_mps_operators.py`` from torch 2.13; do not edit.
"""

from collections.abc import Mapping

Needed = Mapping[str, str]

FORWARD: Needed = {
    "torch.Tensor.frexp": "aten::frexp.Tensor_out",
    "torch.Tensor.geqrf": "aten::geqrf",
    "torch.Tensor.hash_tensor": "aten::hash_tensor.out",
    "torch.Tensor.heaviside": "aten::heaviside.out",
    "torch.Tensor.heaviside_": "aten::heaviside.out",
    "torch.Tensor.lu_solve": "aten::linalg_lu_solve.out",
    "torch.Tensor.matrix_exp": "aten::linalg_matrix_exp",
    "torch.Tensor.mode": "aten::mode",
    "torch.Tensor.ormqr": "aten::ormqr",
    "torch.Tensor.put": "aten::put_",
    "torch.Tensor.put_": "aten::put_",
    "torch.Tensor.svd": "aten::_linalg_svd.U",
    "torch.Tensor.take": "aten::take",
    "torch.frexp": "aten::frexp.Tensor_out",
    "torch.geqrf": "aten::geqrf",
    "torch.hash_tensor": "aten::hash_tensor.out",
    "torch.heaviside": "aten::heaviside.out",
    "torch.linalg.cond": "aten::_linalg_svd.U",
    "torch.linalg.eig": "aten::linalg_eig",
    "torch.linalg.eigh": "aten::_linalg_eigh.eigenvalues",
    "torch.linalg.eigvals": "aten::linalg_eig",
    "torch.linalg.eigvalsh": "aten::_linalg_eigh.eigenvalues",
    "torch.linalg.ldl_factor": "aten::linalg_ldl_factor_ex.out",
    "torch.linalg.ldl_factor_ex": "aten::linalg_ldl_factor_ex.out",
    "torch.linalg.ldl_solve": "aten::linalg_ldl_solve.out",
    "torch.linalg.lstsq": "aten::linalg_lstsq.out",
    "torch.linalg.lu_solve": "aten::linalg_lu_solve.out",
    "torch.linalg.matrix_exp": "aten::linalg_matrix_exp",
    "torch.linalg.svd": "aten::_linalg_svd.U",
    "torch.linalg.svdvals": "aten::_linalg_svd.U",
    "torch.logspace": "aten::logspace.out",
    "torch.lu_solve": "aten::linalg_lu_solve.out",
    "torch.matrix_exp": "aten::linalg_matrix_exp",
    "torch.mode": "aten::mode",
    "torch.nn.AdaptiveAvgPool3d": "aten::_adaptive_avg_pool3d",
    "torch.nn.AdaptiveMaxPool3d": "aten::adaptive_max_pool3d.out",
    "torch.nn.CTCLoss": "aten::_ctc_loss",
    "torch.nn.FractionalMaxPool2d": "aten::fractional_max_pool2d.output",
    "torch.nn.FractionalMaxPool3d": "aten::fractional_max_pool3d.output",
    "torch.nn.MultiLabelMarginLoss": "aten::multilabel_margin_loss_forward",
    "torch.nn.MultiMarginLoss": "aten::multi_margin_loss",
    "torch.nn.functional.adaptive_avg_pool3d": "aten::_adaptive_avg_pool3d",
    "torch.nn.functional.adaptive_max_pool3d": "aten::adaptive_max_pool3d.out",
    "torch.nn.functional.channel_shuffle": "aten::channel_shuffle",
    "torch.nn.functional.ctc_loss": "aten::_ctc_loss",
    "torch.nn.functional.fractional_max_pool2d": "aten::fractional_max_pool2d.output",
    "torch.nn.functional.fractional_max_pool3d": "aten::fractional_max_pool3d.output",
    "torch.nn.functional.multi_margin_loss": "aten::multi_margin_loss",
    "torch.nn.functional.multilabel_margin_loss": "aten::multilabel_margin_loss_forward",
    "torch.nn.functional.pdist": "aten::_pdist_forward",
    "torch.nn.functional.rrelu": "aten::rrelu_with_noise",
    "torch.ormqr": "aten::ormqr",
    "torch.pca_lowrank": "aten::_linalg_svd.U",
    "torch.put": "aten::put_",
    "torch.special.airy_ai": "aten::special_airy_ai.out",
    "torch.special.laguerre_polynomial_l": "aten::special_laguerre_polynomial_l.out",
    "torch.special.legendre_polynomial_p": "aten::special_legendre_polynomial_p.out",
    "torch.special.log_ndtr": "aten::special_log_ndtr.out",
    "torch.special.ndtri": "aten::special_ndtri.out",
    "torch.svd": "aten::_linalg_svd.U",
    "torch.svd_lowrank": "aten::_linalg_svd.U",
    "torch.take": "aten::take",
}
"""The operator that a name needs."""

BACKWARD: Needed = {
    "torch.Tensor.logdet": "aten::linalg_lu_solve.out",
    "torch.linalg.slogdet": "aten::linalg_lu_solve.out",
    "torch.linalg.solve": "aten::linalg_lu_solve.out",
    "torch.linalg.solve_ex": "aten::linalg_lu_solve.out",
    "torch.linalg.tensorsolve": "aten::linalg_lu_solve.out",
    "torch.logdet": "aten::linalg_lu_solve.out",
}
"""The operator that only the gradient of a name needs."""

"""Families that carry MTP and cannot be loaded, each with the reason."""

_NO_RECORD = "its MTP tensors are laid out in a way for which there is no record yet"

UNSUPPORTED: dict[str, str] = {
    "mimo_v2": "transformers has no code for its trunk",
    "mimo_v2_flash": "its MTP layers pair sliding-window attention with a dense MLP, as no layer of its trunk does, "
    "and its config.json declares no depth",
    "step3p5": "each of its MTP layers has an LM head of its own",
    "step3p7": "each of its MTP layers has an LM head of its own",
    "glm_ocr": "its MTP tensors lie under model.language_model, and its config.json may declare none",
    "minimax_m3_vl": "it declares MTP and ships no tensors",
    "deepseek_v4": "its MTP layers read several residual streams",
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "dots3_note",
            "exaone4_5",
            "exaone_moe",
            "glm4_moe_lite",
            "glm5_next",
            "hy_v3",
            "hy_v4",
            "inkling_model",
            "kimi_k3",
            "nemotron_h_puzzle",
            "pangu_ultra_moe",
            "qwen4_exp",
        ),
        _NO_RECORD,
    ),
}

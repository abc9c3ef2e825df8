"""The fix for an unknown setting. It knows the names that settings have in other trainers."""

from collections.abc import Sequence

from utils.config.table import suggestion

# Our name, and its names in timm, torchvision's references, the Hugging Face examples and Lightning.
_SETTINGS = {
    "data": "data_path train_dir dataset dataset_name train_data",
    "image_size": "img_size input_size train_crop_size crop_size",
    "eval_crop": "crop_pct",
    "channels": "in_chans",
    "flip": "hflip",
    "min_scale": "scale",
    "model": "arch model_name model_name_or_path",
    "epochs": "num_epochs num_train_epochs max_epochs",
    "max_steps": "max_train_steps num_steps",
    "batch_size": "b per_device_train_batch_size train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size val_batch_size validation_batch_size",
    "grad_accum": "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
    "optimizer": "opt optim",
    "optimizer_args": "opt_betas opt_eps opt_kwargs adam_beta1 adam_beta2 adam_epsilon",
    "lr": "learning_rate base_lr blr",
    "weight_decay": "wd",
    "lr_schedule": "sched scheduler lr_scheduler lr_scheduler_type",
    "lr_schedule_args": "min_lr lr_min",
    "warmup_steps": "warmup warmup_epochs lr_warmup_epochs num_warmup_steps warmup_ratio",
    "clip_norm": "clip_grad clip_grad_norm max_grad_norm gradient_clip_val",
    "label_smoothing": "smoothing label_smoothing_factor",
    "mixed_precision": "amp fp16 bf16 precision amp_dtype",
    "sync_batchnorm": "sync_bn",
    "output_dir": "output default_root_dir",
    "run_name": "experiment",
    "resume": "resume_from_checkpoint ckpt_path",
    "save_every": "save_steps checkpointing_steps checkpoint_hist",
    "keep": "save_total_limit save_top_k",
    "eval_every": "eval_steps val_check_interval",
    "log_every": "log_interval print_freq logging_steps log_every_n_steps",
    "num_workers": "j workers dataloader_num_workers",
    "init_method": "dist_url",
    "cpu": "device no_cuda use_cpu",
}
# What to do instead, where no single setting does it.
_CROPS = "use --flip, --min_scale or --crop_padding"
_LAUNCH = "the launcher starts the processes: accelerate launch --num_processes N train.py"
_ADVICE = {
    "augment augmentation augmentations": f"{_CROPS} for training images",
    "aa auto_augment randaugment trivialaugment": f"there is no automatic augmentation yet; {_CROPS}",
    "early_stopping early_stop patience early_stopping_patience": "there is no early stopping yet; the best checkpoint "
    "is kept, and eval.py evaluates it",
    "test_only evaluate do_eval": "use python eval.py --ckpt RUN",
    "gpus devices num_gpus nproc_per_node num_processes num_nodes": _LAUNCH,
    "num_classes nb_classes": "leave it out: the classes are those of the data",
}
OTHER_NAMES = {theirs: ours for ours, names in _SETTINGS.items() for theirs in names.split()}
ADVICE = {theirs: text for names, text in _ADVICE.items() for theirs in names.split()}


def fix_for_unknown(name: str, names: Sequence[str], prefix: str = "") -> str:
    """The fix for a setting that is not one of `names`; `prefix` is written before a name that it suggests."""
    theirs = name.lower().replace("-", "_")
    if (ours := OTHER_NAMES.get(theirs)) in names:
        return f"use {prefix}{ours}"
    return ADVICE.get(theirs) or suggestion(name, names, "--help lists all", prefix)

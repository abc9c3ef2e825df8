"""The fix for an unknown setting. It knows the names that settings have in other trainers."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

from utils.config.table import suggestion

# Our name, and its names in timm, torchvision's references, the Hugging Face examples and
# Lightning. Names that `suggestion` finds are not listed.
OTHER_NAMES = {
    "data": "data_path train_dir dataset dataset_name train_data",
    "eval_split": "validation_dir val_dir valid_dir test_dir",
    "eval_fraction": "train_val_split val_split",
    "image_size": "input_size train_crop_size crop_size resolution",
    "eval_size": "val_img_size val_crop_size",
    "eval_crop": "crop_pct",
    "auto_augment": "aa augment augmentation augmentations degrees translate shear",
    "color_jitter": "hsv_h hsv_s hsv_v",
    "auto_augment_args": "ra_magnitude augmix_severity",
    "random_erasing": "reprob",
    "repeats": "ra_sampler ra_reps",
    "loss": "criterion",
    "best_metric": "metric_for_best_model monitor",
    "model": "arch model_name model_name_or_path",
    "model_args": "drop",
    "init_from": "initial_checkpoint start_checkpoint load_from finetune checkpoint ckpt weights",
    "freeze": "freeze_backbone",
    "drop_path": "drop_connect stochastic_depth_prob",
    "epochs": "num_train_epochs max_epochs",
    "max_steps": "max_train_steps",
    "max_seconds": "max_time time_limit",
    "early_stopping": "patience",
    "batch_size": "b per_device_train_batch_size train_batch_size",
    "grad_accum": "gradient_accumulation_steps accumulate_grad_batches",
    "optimizer": "opt optim",
    "optimizer_args": "betas opt_betas opt_eps opt_kwargs adam_beta1 adam_beta2 adam_epsilon",
    "lr": "learning_rate base_lr lr_base",
    "weight_decay": "wd",
    "lr_schedule": "sched lr_scheduler lr_scheduler_type",
    "lr_schedule_args": "min_lr lr_min lrf",
    "clip_norm": "max_grad_norm gradient_clip_val",
    "ema_decay": "model_ema use_ema",
    "find_unused_parameters": "static_graph",
    "mixed_precision": "amp fp16 bf16 half amp_dtype",
    "run_name": "experiment",
    "output_dir": "default_root_dir project save_dir logdir log_dir",
    "resume": "resume_from_checkpoint ckpt_path",
    "save_every": "save_steps checkpointing_steps",
    "keep": "save_total_limit save_top_k checkpoint_hist",
    "eval_every": "eval_steps val_check_interval",
    "log_every": "log_interval print_freq logging_steps",
    "report_to": "log_with with_tracking logger trackers tracker",
    "report": "plots",
    "num_workers": "j",
    "init_method": "dist_url",
    # eval.py, predict.py and export.py
    "ckpt": "checkpoint checkpoint_path model_path model_dir model weights_path",
    "to": "format",
    "out": "output output_file",
}
# What to do instead, where no single setting does it. For train.py; the others use only advice
# whose flags they have.
ADVICE = {
    "data_dir": "use --data; --data_dir is only the folder of torchvision's data sets",
    "warmup_epochs lr_warmup_epochs": "use --warmup_steps, which counts updates or, below 1, is a fraction of the run",
    "cooldown_epochs": "use --cooldown_steps, which counts updates or, below 1, is a fraction of the run",
    "cos_lr": "use --lr_schedule cosine",
    "lr_base_size lr_base_batch": "leave it out: --lr is for the global batch, whatever the number of processes",
    "lr_step_size lr_gamma lr_steps decay_epochs decay_rate decay_milestones lr_power": "use --lr_schedule_args",
    "clip_grad clip_mode gradient_clip_algorithm": "use --clip_norm or --clip_value",
    "norm_weight_decay bias_weight_decay transformer_embedding_decay filter_bias_and_bn": "biases, normalisation "
    "layers, position embeddings and class tokens have no weight decay",
    "remode recount": "each erased image gets one box of the mean colour; --random_erasing is its probability",
    "mixup_switch_prob": "with --mixup and --cutmix, each pair gets one of the two with equal chances",
    "kfold k_fold folds cv": "train once for each fold: --fold 1/5 to --fold 5/5; python -m extras.folds joins them",
    "exist_ok overwrite_output_dir": "use another --run_name, or --resume auto to continue the run",
    "bce_loss": "use --loss binary_cross_entropy",
    "torchcompile compile torch_compile": "set dynamo_config in the accelerate config, see docs/launching.md",
    "log_wandb wandb use_wandb wandb_project": "use --report_to wandb",
    "push_to_hub hub_model_id": "use export.py --ckpt RUN --to timm --out DIR, then hf upload USER/NAME DIR",
    "test_only evaluate do_eval": "use python eval.py --ckpt RUN, or --model NAME --pretrained for published weights",
    "tta test_time_augmentation": "use python eval.py --ckpt RUN --tta flip,shift",
    "throughput benchmark": "use --dry_run, which times an update, or eval.py --ckpt RUN --throughput",
    "device no_cuda": "GPUs are used if there are any; --cpu avoids them",
    "gpu gpus gpu_id devices ddp strategy num_gpus nproc_per_node num_processes num_nodes": "the launcher "
    "starts the processes: accelerate launch --num_processes N train.py",
    "compute_environment distributed_type num_machines machine_rank main_training_function config_file": "give the "
    "file to the launcher: accelerate launch --config_file FILE train.py",
    "num_classes nb_classes num_labels classes class_names labels": "leave it out: the classes are those of the data",
}


def fix_for_unknown(name: str, names: Sequence[str], prefix: str = "") -> str:
    """The fix for a setting that is not one of `names`; `prefix` is written before a name that it
    suggests.
    """
    theirs = name.lower().replace("-", "_")
    if theirs in ("input", "images", "image") and "html" in names:
        return "name the images without a flag: predict.py --ckpt RUN PATH..."
    fixes: dict[str, str] = {}
    for others, text in ADVICE.items():
        if "lr" in names or set(re.findall(r"--(\w+)", text)) <= set(names):
            fixes |= dict.fromkeys(others.split(), text)
    for ours, others in OTHER_NAMES.items():
        if ours in names:
            fixes |= dict.fromkeys(others.split(), f"use {prefix}{ours}")
    misspelled = get_close_matches(theirs, fixes, n=1, cutoff=0.8)
    otherwise = fixes[misspelled[0]] if misspelled else "--help lists all"
    return fixes.get(theirs) or suggestion(name, names, otherwise, prefix)

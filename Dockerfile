# Lockstep on CPUs. The last line trains on digits; any other command may follow the name of the image:
#     docker build --tag lockstep . && mkdir -p runs
#     docker run --shm-size 1g --user "$(id -u)" -v "$PWD/runs:/lockstep/runs" lockstep
# No container has been built from this so far. tests/repository/test_container.py runs its steps without one.
FROM python:3.12-slim
# pip prefers PyTorch's builds without CUDA, from this index. Any user may write to /tmp.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu HOME=/tmp
WORKDIR /lockstep
COPY requirements.txt constraints.txt ./
RUN pip install --no-cache-dir -r requirements.txt -c constraints.txt
COPY . .
RUN useradd lockstep && mkdir --mode 777 runs
USER lockstep
CMD ["accelerate", "launch", "--config_file", "accelerate_configs/2cpu.yaml", "train.py"]

cd /work/build/two-gpus/model_repository && \
PATH="/usr/bin:$PATH" \
TRTLLM_ORCHESTRATOR="1" \
TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES="1" \
mpirun --allow-run-as-root \
-n 1 /opt/tritonserver/bin/tritonserver --model-repository=/work/build/two-gpus/model_repository --disable-auto-complete-config --http-port=8000 --grpc-port=8001 --metrics-port=8002 --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1 --id=specbuild-8001- --exit-timeout-secs=5 --backend-config=python,shm-region-prefix-name=specbuild-8001- --pinned-memory-pool-byte-size=0 --enable-peer-access=false --cuda-memory-pool-byte-size=0:0 --cuda-memory-pool-byte-size=1:0

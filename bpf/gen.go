// SPDX-License-Identifier: Apache-2.0

package bpf

// The compiler is the pinned one of scripts/generate, which also gives the
// include path.
//
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -type instar_abi -type instar_steering -type instar_verdict -type instar_stage -type instar_slot -type instar_order -type instar_info -type instar_control -type instar_secrets -type instar_flow -type instar_counters -type instar_event -type instar_traced quic quic.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel stateless stateless.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -type instar_peer -type instar_tracked -type instar_learning flow flow.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel wireguard wireguard.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -type instar_dissected custom custom.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel tcp tcp.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel answer answer.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel -output-suffix _test -type instar_class -type instar_extent classify classify_test.bpf.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -I/usr/include/x86_64-linux-gnu

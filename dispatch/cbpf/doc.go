// SPDX-License-Identifier: Apache-2.0

// Package cbpf translates classic BPF to eBPF.
//
// Programs in classic BPF choose the socket of a reuseport group
// (SO_ATTACH_REUSEPORT_CBPF), and tools write it: tcpdump -ddd, nfbpf_compile,
// bpf_asm. An eBPF program can do what such a program does by calling its
// translation, a function that takes the context and returns the classic
// program's value:
//
//	program, err := cbpf.Parse(text)
//	dissect, err := cbpf.Translate(program, cbpf.Options{Context: cbpf.ReusePort})
//	spec.Instructions = append(main, dissect...) // main calls "dissect"
//
// A translation is plain code without maps, and may be used any number of times;
// translations with different symbols can be in one program. Its functions carry
// type information and lines, as the kernel wants it of all functions of a
// program when it has it of one: in a program that is dumped (bpftool prog dump
// xlated linum) each classic instruction stands before its translation.
//
// # What it does
//
// The translation returns what the kernel's classic filter returns, for every
// packet. The rules are those of net/core/filter.c, where no other file is named:
//
//   - A program has 1 to 4096 instructions, jumps forward only, and ends with a
//     return. [Check] accepts what bpf_check_classic accepts, not more and not
//     less. A word of scratch memory is stored before it is loaded, on all ways,
//     as check_load_and_stores sees them.
//   - A and X are 0 at the start. Numbers have 32 bits and no sign
//     (bpf_convert_filter).
//   - A load that reaches past the end of the packet ends the program with the
//     value 0 (convert_bpf_ld_abs). So does a division by an X that is 0, or its
//     remainder.
//   - A shift by X is one by its lowest five bits: that is the 32-bit shift of
//     eBPF (kernel/bpf/core.c). A shift by a constant is by 31 at most.
//   - The offset of an indirect load is X+k modulo 2^32, taken for a signed
//     number. Negative ones count from a header, as those of a load from a fixed
//     offset: from SKF_NET_OFF on from the network header, from SKF_LL_OFF on from
//     the link layer's (bpf_skb_load_helper_8 and the like).
//   - Ancillary loads (convert_bpf_extensions) are special with a fixed offset
//     only, whatever their size.
//
// In a [SocketFilter] the packet is what the socket's classic filter sees: on
// UDP it begins at the UDP header. In a [ReusePort] program it is the payload of
// a UDP datagram, as in run_bpf_filter (net/core/sock_reuseport.c), and its
// length is the payload's; groups of TCP sockets are not supported, where the
// length of the header varies.
//
// Ancillary loads, by context:
//
//	                                          SocketFilter   ReusePort
//	PROTOCOL, CPU, RANDOM, ALU_XOR_X          yes            yes
//	PKTTYPE, IFINDEX, MARK, QUEUE, RXHASH,
//	VLAN_TAG, VLAN_TAG_PRESENT, VLAN_TPID     yes            no
//	HATYPE, PAY_OFFSET, NLATTR, NLATTR_NEST   no             no
//
// What is not there is refused with an [*InstructionError], unless control never
// comes to the instruction.
//
// # How it does it
//
// A socket filter uses the packet loads of eBPF itself, LD_ABS and LD_IND, which
// are those of the kernel's translation of classic programs. A reuseport program
// has none, and reads in place what is linear, after one check for a group of
// loads. Where the packet is not linear or too short, it goes on in a second
// copy of the program, in which every load is a call of a function that asks the
// kernel (bpf_skb_load_bytes, bpf_skb_load_bytes_relative).
//
// The verifier accepts every translation, of the longest programs, too, and of
// those that would have it try an exponential number of ways: where ways meet,
// it is made to forget what it knows about A and X, if they are still used.
//
// # Limits
//
//   - In a ReusePort program a load relative to a header reads the linear part
//     of the packet only, and 65535 bytes from the header at most. The kernel's
//     own filter had the first limit until Linux 6.16.
//   - To load a program with a ReusePort translation takes CAP_BPF and
//     CAP_PERFMON: without the latter the verifier refuses arithmetic with
//     pointers.
//   - Linux 5.10 is the oldest kernel. A jump over some thousand instructions
//     that load or that ways meet at can need one of 32 bits, which Linux 6.6
//     has; most such programs no kernel takes as classic ones.
package cbpf

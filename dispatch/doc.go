// SPDX-License-Identifier: Apache-2.0

// Package dispatch is the control plane of UDP and TCP servers that are upgraded with
// nothing lost. The sockets of one address form a group; each process instance
// is a generation of the group; a program in the kernel gives each packet to
// the generation that its flow belongs to, and new flows to the active one.
//
// # Life cycle
//
// A server opens its group, joins with one socket a worker, gets ready, and
// activates its generation:
//
//	group, err := dispatch.Open(dispatch.Options{Address: "192.0.2.1:443"})
//	generation, err := group.Join(min(runtime.NumCPU(), dispatch.DefaultWorkers))
//	// read generation.Conns(), or give them to a QUIC library; with TCP serve on
//	// generation.Listeners()
//	err = generation.Activate()
//
// The generation that was active before is draining from that moment: no new
// flow reaches it, its own flows still do. It learns so from
// [Generation.Superseded] and leaves with [Generation.Drain]:
//
//	<-generation.Superseded()
//	report, err := generation.Drain(ctx, dispatch.DrainOptions{Done: idle, Deadline: time.Minute})
//	if errors.Is(err, dispatch.ErrReinstated) { /* active again: go on serving */ }
//	generation.Close()
//
// # State and ownership
//
// There is no daemon. A group is a folder of pinned maps on a bpffs, below
// [DefaultRoot], named by network namespace, protocol, address and device. Any
// process with the rights to the folder is a control plane; writers exclude
// each other with flock(2) on the folder. The table of generations is mapped
// memory: reading it is cheap, and the step that makes a generation active is
// one 64-bit store.
//
// A Group and a Generation belong to the caller, who closes them. The sockets
// belong to the Generation: closing one by hand takes that worker out, as a
// crash would. All methods may be called from several goroutines.
//
// A process that dies at any point leaves nothing to clean up by hand: the
// kernel empties the socket map, the data plane goes on to the next generation
// in the order of last resort, and the next writer, or any living generation
// within a quarter of a second, mends the table.
//
// Where there is no bpffs, [Options].Files passes the objects of the group from process
// to process: a *handover.Handover of package instar/handover. The group then lives as
// long as one of them, and no tool sees it.
//
// Secrets (connection-ID keys, and whatever [Group.Secret] derives) belong to the
// group and outlive its processes.
//
// # Needs
//
// Linux 5.10 or later (TCP: 5.14) and a bpffs, or Options.Files. Creating a group needs CAP_BPF, CAP_NET_ADMIN
// and CAP_PERFMON (without the last one the verifier refuses pointer arithmetic
// that it holds open to speculation). A server without any capability can join a
// group that [Prepare] made for its user, on Linux 5.19 or later where
// kernel.unprivileged_bpf_disabled is set.
package dispatch

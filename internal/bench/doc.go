// SPDX-License-Identifier: Apache-2.0

// Command bench measures what Instar costs on this machine: the time that its
// programs take for a packet, how much of a receiving process's throughput is
// left, and how long the calls of the control plane take. scripts/bench runs it.
//
// # What is measured
//
// The cost of a packet is net: the kernel counts the run time of each program
// while somebody holds BPF_ENABLE_STATS, and from the average of a program that
// average is taken which a program has that decides nothing. Real datagrams go
// over the loopback device to groups made by package dispatch. Each round sends
// as many of them to each program, one program after the other; what a round
// shows is compared within the round, and the median of the rounds is the
// result. So a machine that is busy with something else disturbs all programs
// alike. The counters of the group have to say that every packet took the way
// that the row is about.
//
// The row "select" shows what the kernel takes to find one socket in an array: no
// program here can be faster. Programs with a part left out showed where the rest goes
// (Linux 6.18, AMD EPYC, mitigations on, where "select" takes 50): "stateless" another 9
// for the active generation and 7 to 9 for the counters; "quic" with an ID of ours 10 to
// 15 for the header and the socket's index, 25 to 30 for SipHash-2-4 and the tag, 9 for
// the counters. An Initial takes another 45 for the hash of its ID and from 70 (few
// handshakes) to some hundred (many, whose entries left the caches) to look it up; a new
// one, into a full table, 500 to 1000 for making the entry.
//
// The row "tcp" is of connections: the kernel asks once for each, and the same program's
// time is taken from it.
//
// Caches are warm, as in a server under load: a packet that comes alone costs
// more, with any program.
//
// Throughput is what a receiving loop gets with Instar and with plain
// SO_REUSEPORT, in turns. With two CPUs the sender and the kernel's receive
// path, the program with it, have one and the receiving loop the other. With
// one CPU everything shares it: each packet pays for its way from sendmmsg to
// recvmmsg, and the program's share is the largest that it can be. The row
// "empty" shows what is lost to having any program, and "plain", without one a
// second time, how exact the comparison is.
//
// Operations are timed as the caller sees them, locks and repairs included.
package main

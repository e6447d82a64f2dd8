// SPDX-License-Identifier: Apache-2.0

// Package wgdemo is a WireGuard gateway in user space that upgrades itself with no packet
// lost, and a demonstration that counts what its peers lose.
//
// # A gateway's upgrade
//
// The next process gets the TUN device as a descriptor and the peers' endpoints as state
// (package handover), and joins the group of the UDP port as a new generation (package
// dispatch). At the commit
//
//  1. the old process stops reading the TUN device, which it may do while it holds the
//     lease; what leaves meanwhile waits in the device's queue;
//  2. the new one activates its generation, so that new handshakes come to it;
//  3. it initiates a handshake with every peer that had a session a moment ago;
//  4. it reads the TUN device once those have answered, or after GatewayConfig.Hold.
//
// Sessions are not moved. A peer sends with its newest session and takes packets of the one
// before, so that it goes to the new process with its handshake, one round trip after the
// commit. What it sent before still names an index of the old process, which gets it by
// that, decrypts it, and writes it into the same TUN device. The old process leaves when all
// peers have gone over, or after GatewayConfig.Deadline.
//
// When the new process fails in its probation, the old one activates its own generation
// again, initiates handshakes in its turn, and reads on.
//
// The timestamps (TAI64N) of the peers' handshakes go on with the state, so that what the old
// process refused as a replay the new one refuses, too. The handshakes that the new process
// begins are later than its predecessor's by the clock that both share, and the old one begins
// none any more.
package wgdemo

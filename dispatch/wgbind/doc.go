// SPDX-License-Identifier: Apache-2.0

// Package wgbind makes wireguard-go (golang.zx2c4.com/wireguard) send and receive on a
// generation of package dispatch, whose group has SteeringWireGuard.
//
// [New] gives a conn.Bind for device.NewDevice. It receives on every worker socket of the
// generation and sends by them, in batches, with UDP segmentation and receive offload
// where the kernel has them, and with the source address that the peer used.
//
// # Indices
//
// A WireGuard message names the index that its receiver made up for the session. Whoever
// announces an index gets what is sent to it, so every handshake initiation and response
// (types 1 and 2) that leaves has its index registered before, on the socket that it
// leaves by. Where another generation has the index already the message is not sent: the
// device tries again with a new index, as after any loss.
//
// # Upgrades
//
// A new generation opens its device, activates the generation, and initiates a handshake
// with each peer; the responses come to it by their index. A peer sends with its newest
// session, and accepts packets of the one before, so nothing is lost between the two
// processes while both live. The old generation keeps its device open, and its sessions
// work, until [dispatch.Generation.Drain] returns.
//
// A generation that is draining initiates no handshake: it would take the peer back from
// its successor. Its Bind drops such messages. It still answers those that reached it.
//
// # Ownership
//
// The sockets belong to the generation. Close unblocks the receivers and leaves the
// sockets open, since a device closes and opens its Bind whenever it goes down and up.
// Nothing else may read them or set their read deadlines.
//
// # Limits
//
// Receive offload joins packets of one sender before the group sees them, and the first
// decides where they go. When a peer changes its session in the middle of such a train, what
// follows is lost, as in a reordering of the network. Options.NoReceiveOffload avoids it at the
// cost of throughput.
package wgbind

// SPDX-License-Identifier: Apache-2.0

// Package systemd speaks with the service manager: the notifications of
// sd_notify(3), the descriptors of socket activation (sd_listen_fds(3)), and
// the descriptor store that outlives a restart of the service.
//
// # Notifications
//
// A [Notifier] sends datagrams to the socket that NOTIFY_SOCKET names. Without
// one it is nil, and all of its methods do nothing. It keeps no descriptor
// open, and it leaves the variable in the environment: a successor that this
// process starts needs it. No method waits for longer than some seconds, but for
// [Notifier.Barrier], which waits for as long as its context lets it.
//
// That a datagram was sent does not say that the manager obeyed. It drops
// what the unit's NotifyAccess= does not allow, and descriptors beyond
// FileDescriptorStoreMax=, without an answer. Barrier says that it has read
// everything sent before.
//
// With NotifyAccess=main only the main process is heard. So the predecessor, not
// the successor, names the new main process; it does so together with READY=1, in
// one datagram, and waits for a barrier before it leaves. Then the successor is
// heard:
//
//	err := n.Send("MAINPID="+strconv.Itoa(successor), "READY=1")
//	err = n.Barrier(ctx)
//
// At that moment the successor has to be a child of the manager, not of the
// predecessor: it has to be started with CLONE_PARENT, or by a process in between
// that has ended. systemd looks once, when it reads MAINPID. A main process that is
// not its child gets no time to end: when the service is stopped it is killed right
// after SIGTERM, unless others of the cgroup are waited for, and its crash stays
// unnoticed as long as its parent lives. That is so for each KillMode= (seen
// with systemd 252; src/core/service.c, main_pid_alien).
//
// # Socket activation
//
// [Inherited] takes the descriptors over, each with its name. Their order is
// that of unit files and says nothing, so there is no access by index.
//
// # The store
//
// Descriptors given to [Notifier.StoreFD] come back by Inherited after a restart.
// [StoreName] makes a name of a role and a generation, and [Latest] sorts what
// came back. The store is a cache: the manager may have dropped any entry.
//
// The manager compares open files, not names: one that is in the store is not
// stored a second time, under another name either (kcmp(2)). An inherited
// listener is the same open file in each generation. To give an entry the name of
// the next generation there is [Notifier.RenameFD].
//
// The package needs Linux 4.4. RELOADING=1 needs its time stamp since systemd
// 253, BARRIER=1 exists since 246, and FDSTOREREMOVE=1 since 236.
package systemd

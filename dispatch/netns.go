// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// namespaceName names the network namespace of the calling thread: its cookie,
// which the kernel never uses twice, or before Linux 5.14 the inode number.
func namespaceName() (string, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("find network namespace: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	return namespaceOf(fd)
}

// namespaceOf names the network namespace of a socket.
func namespaceOf(fd int) (string, error) {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err == nil {
		return strconv.FormatUint(cookie, 10), nil
	}
	if !errors.Is(err, unix.ENOPROTOOPT) {
		return "", fmt.Errorf("find network namespace: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), &st); err != nil {
		return "", fmt.Errorf("find network namespace: %w", &os.PathError{Op: "stat", Path: "/proc/self/task/TID/ns/net", Err: err})
	}
	return fmt.Sprintf("inode-%d", st.Ino), nil
}

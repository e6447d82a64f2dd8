// SPDX-License-Identifier: Apache-2.0

// Package bpffs wraps the file system of pinned BPF objects: telling one from
// other file systems, names that it accepts, folders locked with flock(2), and
// publishing by rename(2).
//
// Locks and renames work on any file system of Linux 4.9 and later (bpffs has
// renames since then).
package bpffs

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// IsBPFFS reports whether path is on a bpffs.
func IsBPFFS(path string) (bool, error) {
	var st unix.Statfs_t
	for {
		err := unix.Statfs(path, &st)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return false, &os.PathError{Op: "statfs", Path: path, Err: err}
		}
		return st.Type == unix.BPF_FS_MAGIC, nil
	}
}

const hex = "0123456789abcdef"

// escaped reports whether Escape replaces the byte. A bpffs refuses names with
// a dot (kernel/bpf/inode.c, bpf_lookup), every file system those with a
// slash or NUL, and terminals should not see control characters.
func escaped(c byte) bool {
	return c == '.' || c == '/' || c == '%' || c < 0x20 || c == 0x7f
}

// Escape makes a name of an entry on a bpffs from any string, by writing the
// bytes that a name cannot have as %xx. Different strings have different
// names. The empty string stays empty; a name longer than 255 bytes is refused
// by the kernel.
func Escape(s string) string {
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; escaped(c) {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&0xf])
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// Unescape returns the string that Escape made the name from. It refuses names
// that Escape does not make.
func Unescape(name string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		c := name[i]
		switch {
		case c == '%':
			if i+2 >= len(name) {
				return "", fmt.Errorf("unescape %q: %%xx is cut off", name)
			}
			hi, lo := strings.IndexByte(hex, name[i+1]), strings.IndexByte(hex, name[i+2])
			if hi < 0 || lo < 0 || !escaped(byte(hi<<4|lo)) {
				return "", fmt.Errorf("unescape %q: %s is not from Escape", name, name[i:i+3])
			}
			b.WriteByte(byte(hi<<4 | lo))
			i += 2
		case escaped(c):
			return "", fmt.Errorf("unescape %q: %q is not from Escape", name, c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String(), nil
}

// RenameNoReplace renames an entry and fails with fs.ErrExist when there is
// one of the new name, an empty folder included, which rename(2) would
// replace.
func RenameNoReplace(oldPath, newPath string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, oldPath, unix.AT_FDCWD, newPath, unix.RENAME_NOREPLACE); err != nil {
		return &os.LinkError{Op: "rename", Old: oldPath, New: newPath, Err: err}
	}
	return nil
}

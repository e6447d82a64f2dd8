// SPDX-License-Identifier: Apache-2.0

package vmtest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// archive writes what a kernel unpacks into its first file system: cpio in the format
// "newc" (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's
// source). Everything belongs to root. The folders above what is added are made.
type archive struct {
	w    *bufio.Writer
	last uint32          // number of the last file
	has  map[string]bool // names, to have each once
	err  error           // the first one
}

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<16), has: map[string]bool{}}
}

// entry writes a header, name and content.
func (a *archive) entry(name string, mode, rmajor, rminor uint32, size int64, content io.Reader) error {
	if a.err != nil {
		return a.err
	}
	a.err = func() error {
		if size > 0xffffffff {
			return fmt.Errorf("add %s to archive: %d bytes are too many", name, size)
		}
		a.last++
		header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
			a.last, mode, 0, 0, 1, 0, size, 0, 0, rmajor, rminor, len(name)+1, 0)
		if _, err := a.w.WriteString(header + name + "\x00" + zeros(len(header)+len(name)+1)); err != nil {
			return err
		}
		if content != nil {
			if n, err := io.Copy(a.w, content); err != nil || n != size {
				return errors.Join(err, fmt.Errorf("add %s to archive: %d bytes came instead of %d", name, n, size))
			}
		}
		_, err := a.w.WriteString(zeros(int(size % 4)))
		return err
	}()
	return a.err
}

// zeros fill up to a multiple of four.
func zeros(n int) string { return "\x00\x00\x00"[:(4-n%4)%4] }

// add notes the name and adds the folders above it. It returns false when the name is
// there already.
func (a *archive) add(name string) (clean string, fresh bool) {
	clean = strings.TrimPrefix(path.Clean("/"+name), "/")
	if clean == "" || a.has[clean] {
		return clean, false
	}
	if parent := path.Dir(clean); parent != "." {
		a.folder(parent)
	}
	a.has[clean] = true
	return clean, true
}

func (a *archive) folder(name string) {
	if clean, fresh := a.add(name); fresh {
		_ = a.entry(clean, unix.S_IFDIR|0o755, 0, 0, 0, nil) // close tells
	}
}

func (a *archive) text(name, text string) {
	if clean, fresh := a.add(name); fresh {
		_ = a.entry(clean, unix.S_IFREG|0o644, 0, 0, int64(len(text)), strings.NewReader(text)) // close tells
	}
}

func (a *archive) link(name, target string) {
	if clean, fresh := a.add(name); fresh {
		_ = a.entry(clean, unix.S_IFLNK|0o777, 0, 0, int64(len(target)), strings.NewReader(target)) // close tells
	}
}

func (a *archive) device(name string, major, minor uint32) {
	if clean, fresh := a.add(name); fresh {
		_ = a.entry(clean, unix.S_IFCHR|0o600, major, minor, 0, nil) // close tells
	}
}

// file adds the file at source, or what it links to.
func (a *archive) file(name, source string) error {
	clean, fresh := a.add(name)
	if !fresh {
		return nil
	}
	f, err := os.Open(source)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("add %s to archive: it is no regular file", source)
	}
	return a.entry(clean, unix.S_IFREG|uint32(info.Mode().Perm()), 0, 0, info.Size(), f)
}

// tree adds a file, or a folder and everything in it.
func (a *archive) tree(name, source string) error {
	return filepath.WalkDir(source, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(source, file)
		if err != nil {
			return err
		}
		inside := path.Join(name, filepath.ToSlash(below))
		switch {
		case d.IsDir():
			a.folder(inside)
			return nil
		case d.Type() == fs.ModeSymlink && file != source:
			target, err := os.Readlink(file)
			if err != nil {
				return err
			}
			a.link(inside, target)
			return nil
		default:
			return a.file(inside, file)
		}
	})
}

// close ends the archive and returns the first error that there was.
func (a *archive) close() error {
	if err := a.entry("TRAILER!!!", 0, 0, 0, 0, nil); err != nil {
		return err
	}
	return a.w.Flush()
}
